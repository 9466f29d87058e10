-- The destinations that rows at work name, known to the settings or not: one index probe for each.
WITH RECURSIVE live AS (
    (SELECT destination FROM outbox_messages WHERE status IN ('Pending', 'Processing') ORDER BY destination LIMIT 1)
    UNION ALL
    SELECT (
        SELECT m.destination FROM outbox_messages AS m
        WHERE m.status IN ('Pending', 'Processing') AND m.destination > live.destination
        ORDER BY m.destination LIMIT 1
    )
    FROM live WHERE live.destination IS NOT NULL
)
SELECT destination FROM live WHERE destination IS NOT NULL
