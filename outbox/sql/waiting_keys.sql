-- The keys whose next message is put away: a worker that ended before release.sql has left them so.
WITH RECURSIVE head AS (
    (SELECT destination, ordering_key, next_attempt_at FROM outbox_messages
     WHERE ordering_key IS NOT NULL AND status IN ('Pending', 'Processing')
     ORDER BY destination, ordering_key, order_no LIMIT 1)
    UNION ALL
    SELECT next.* FROM head CROSS JOIN LATERAL (
        SELECT q.destination, q.ordering_key, q.next_attempt_at FROM outbox_messages AS q
        WHERE q.ordering_key IS NOT NULL AND q.status IN ('Pending', 'Processing')
          AND (q.destination, q.ordering_key) > (head.destination, head.ordering_key)
        ORDER BY q.destination, q.ordering_key, q.order_no LIMIT 1
    ) AS next
)
SELECT destination, ordering_key FROM head WHERE next_attempt_at = timestamptz '9999-12-31 00:00Z'
