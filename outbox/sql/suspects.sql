-- Whether a due row waits to be claimed alone (claim_suspect.sql).
SELECT EXISTS (
    SELECT FROM unnest(%(destinations)s::text[]) AS d (name)
    CROSS JOIN LATERAL (
        SELECT q.lost_leases, q.status, q.attempt_count FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
          AND q.next_attempt_at <= statement_timestamp()
        ORDER BY q.next_attempt_at, q.created_at, q.outbox_message_id
        LIMIT 1000
    ) AS head
    WHERE head.lost_leases + (head.status = 'Processing')::integer >= 2 AND head.attempt_count < %(max_attempts)s
)
