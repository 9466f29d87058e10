-- Find out which due messages with an ordering_key are heads; the others are put away until release.sql calls them.
UPDATE outbox_messages AS m SET
    is_head = found.is_head,
    next_attempt_at = CASE WHEN found.is_head THEN m.next_attempt_at ELSE timestamptz '9999-12-31 00:00Z' END
FROM (
    SELECT q.outbox_message_id, NOT EXISTS (
        SELECT FROM outbox_messages AS before
        WHERE before.destination = q.destination AND before.ordering_key = q.ordering_key
          AND before.status IN ('Pending', 'Processing') AND before.order_no < q.order_no
    ) AS is_head
    FROM outbox_messages AS q
    WHERE q.ordering_key IS NOT NULL AND NOT q.is_head AND q.status = 'Pending'
      AND q.next_attempt_at <= statement_timestamp()
    ORDER BY q.next_attempt_at
    LIMIT %(at_most)s
    FOR NO KEY UPDATE SKIP LOCKED  -- checks NOT is_head again on the newest version: release.sql may have been here
) AS found
WHERE m.outbox_message_id = found.outbox_message_id
RETURNING m.is_head
