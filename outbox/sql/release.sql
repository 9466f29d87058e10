-- Make the next message of each key its head. Runs after the commit that finished the one before: a message that this
-- snapshot does not show was committed later than that, so promote.sql finds it to be a head.
UPDATE outbox_messages AS m SET
    is_head = true,
    next_attempt_at = CASE WHEN m.next_attempt_at = timestamptz '9999-12-31 00:00Z'
        THEN statement_timestamp() ELSE m.next_attempt_at END,
    redriven_at = CASE WHEN m.next_attempt_at = timestamptz '9999-12-31 00:00Z'
        THEN statement_timestamp() ELSE m.redriven_at END  -- the give-up time starts when its turn comes
WHERE NOT m.is_head AND m.status = 'Pending' AND m.outbox_message_id = ANY (ARRAY(
    SELECT next.outbox_message_id
    FROM unnest(%(destinations)s::text[], %(keys)s::text[]) AS k (destination, key)
    CROSS JOIN LATERAL (
        SELECT q.outbox_message_id FROM outbox_messages AS q
        WHERE q.destination = k.destination AND q.ordering_key = k.key AND q.status IN ('Pending', 'Processing')
        ORDER BY q.order_no LIMIT 1
    ) AS next
))
RETURNING m.outbox_message_id
