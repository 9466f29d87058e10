-- How many rows are due, counted no further than asked for.
SELECT count(*) FROM (
    SELECT FROM unnest(%(destinations)s::text[]) AS d (name)
    CROSS JOIN LATERAL (
        SELECT FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
          AND q.next_attempt_at <= statement_timestamp()
        ORDER BY q.next_attempt_at
        LIMIT %(at_most)s
    ) AS due
    LIMIT %(at_most)s
) AS counted
