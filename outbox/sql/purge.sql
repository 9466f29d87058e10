-- Delete Processed rows past their retention, a chunk at a time; Failed rows stay.
DELETE FROM outbox_messages WHERE outbox_message_id = ANY (ARRAY(
    SELECT outbox_message_id FROM outbox_messages
    WHERE status = 'Processed' AND processed_at < statement_timestamp() - make_interval(secs => %(retention_seconds)s)
    LIMIT %(chunk)s
    FOR UPDATE SKIP LOCKED
))
