-- Rows at work and failed, by destination and status; Processed ones are history and are not counted.
SELECT
    destination,
    count(*) FILTER (WHERE status = 'Pending') AS pending,
    count(*) FILTER (WHERE status = 'Processing') AS processing,
    count(*) FILTER (WHERE status = 'Failed') AS failed,
    coalesce(extract(epoch FROM statement_timestamp() - min(next_attempt_at)
        FILTER (WHERE status <> 'Failed' AND next_attempt_at <= statement_timestamp())), 0)::float8 AS oldest_due_seconds
FROM outbox_messages
WHERE status IN ('Pending', 'Processing') OR status = 'Failed'
GROUP BY destination
ORDER BY destination
