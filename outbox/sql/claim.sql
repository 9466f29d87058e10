-- Claim due rows under one lease: oldest first within a destination, an equal share to each destination with work.
WITH waiting AS MATERIALIZED (
    -- Which destinations have a due row and room for it; one index probe each.
    SELECT d.name, d.room, count(*) OVER () AS rivals
    FROM unnest(%(destinations)s::text[], %(rooms)s::integer[]) AS d (name, room)
    CROSS JOIN LATERAL (
        SELECT q.next_attempt_at FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
          AND q.next_attempt_at <= statement_timestamp()
        ORDER BY q.next_attempt_at LIMIT 1
    ) AS oldest
    WHERE d.room > 0
    ORDER BY oldest.next_attempt_at  -- with more destinations than rows to claim, who waited longest goes first
    LIMIT %(batch_size)s
)
UPDATE outbox_messages AS m SET
    status = 'Processing',
    attempt_count = m.attempt_count + 1,
    -- still Processing and due: the last worker lost its lease
    lost_leases = m.lost_leases + (m.status = 'Processing')::integer,
    lease_token = %(lease_token)s,
    processing_started_at = statement_timestamp(),
    lease_expires_at = statement_timestamp() + make_interval(secs => %(lease_seconds)s),
    next_attempt_at = statement_timestamp() + make_interval(secs => %(lease_seconds)s)
-- = ANY(ARRAY()) runs the subquery once; IN may run it again for each row and claim more than the limit.
WHERE m.outbox_message_id = ANY (ARRAY(
    SELECT head.outbox_message_id
    FROM waiting CROSS JOIN LATERAL (
        SELECT q.outbox_message_id FROM outbox_messages AS q
        WHERE q.destination = waiting.name
          AND q.status IN ('Pending', 'Processing')        -- the partial index's own predicate
          AND q.next_attempt_at <= statement_timestamp()   -- for a Processing row: its lease ran out
          AND (q.ordering_key IS NULL OR q.is_head)        -- else it is another's turn
          AND q.attempt_count < %(max_attempts)s           -- else expire.sql makes it Failed
          AND coalesce(q.redriven_at, q.created_at) > statement_timestamp() - make_interval(secs => %(give_up_seconds)s)
          AND q.lost_leases + (q.status = 'Processing')::integer < 2  -- else claim_suspect.sql takes it, alone
        ORDER BY q.next_attempt_at, q.created_at, q.outbox_message_id
        LIMIT least(waiting.room, greatest(1, %(batch_size)s / waiting.rivals))
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS head
))
RETURNING
    m.outbox_message_id, m.lease_token, m.event_type, m.destination, m.attempt_count, m.traceparent, m.ordering_key,
    CASE WHEN octet_length(m.payload::text) <= %(max_payload_bytes)s THEN m.payload::text END AS payload,
    to_char(m.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
    extract(epoch FROM statement_timestamp() - m.created_at)::float8 AS age_seconds,
    extract(epoch FROM statement_timestamp() - coalesce(m.redriven_at, m.created_at))::float8 AS tried_seconds,
    extract(epoch FROM statement_timestamp())::float8 AS claimed_at
