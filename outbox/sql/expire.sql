-- Make due rows Failed that are out of attempts or time; claim.sql never takes those.
UPDATE outbox_messages AS m SET
    status = 'Failed',
    failed_at = statement_timestamp(),
    lease_token = NULL,
    lease_expires_at = NULL,
    failure_code = CASE WHEN m.attempt_count >= %(max_attempts)s THEN 'attempts_exhausted' ELSE 'gave_up' END,
    last_error = left(
        CASE WHEN m.attempt_count >= %(max_attempts)s THEN 'out of attempts' ELSE 'out of time' END
        || ' (attempts: ' || m.attempt_count || ')'
        || CASE WHEN m.status = 'Processing' THEN '; the worker was lost before it recorded a result' ELSE '' END
        || coalesce('; before: ' || m.last_error, ''), 500)
WHERE m.outbox_message_id = ANY (ARRAY(
    SELECT locked.outbox_message_id
    FROM unnest(%(destinations)s::text[]) AS d (name)
    CROSS JOIN LATERAL (
        -- never claimed, so they gather at the head: looking there finds them without a scan
        SELECT q.outbox_message_id, q.attempt_count, coalesce(q.redriven_at, q.created_at) AS since
        FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
          AND q.next_attempt_at <= statement_timestamp()
        ORDER BY q.next_attempt_at, q.created_at, q.outbox_message_id
        LIMIT 1000
    ) AS head
    CROSS JOIN LATERAL (
        SELECT q.outbox_message_id FROM outbox_messages AS q
        WHERE q.outbox_message_id = head.outbox_message_id
          AND q.status IN ('Pending', 'Processing') AND q.next_attempt_at <= statement_timestamp()
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS locked
    WHERE head.attempt_count >= %(max_attempts)s
       OR head.since <= statement_timestamp() - make_interval(secs => %(give_up_seconds)s)
))
RETURNING m.outbox_message_id, m.event_type, m.destination, m.attempt_count, m.failure_code, m.last_error, m.ordering_key
