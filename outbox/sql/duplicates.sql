-- The messages that already have this dedupe_key.
SELECT destination, outbox_message_id FROM outbox_messages
WHERE destination = ANY (%(destinations)s::text[]) AND dedupe_key = %(dedupe_key)s AND discarded_at IS NULL
