-- Claim one due row that lost two leases in a row, to be delivered alone: it may be what kills its worker.
UPDATE outbox_messages AS m SET
    status = 'Processing',
    attempt_count = m.attempt_count + 1,
    lost_leases = m.lost_leases + (m.status = 'Processing')::integer,
    lease_token = %(lease_token)s,
    processing_started_at = statement_timestamp(),
    lease_expires_at = statement_timestamp() + make_interval(secs => %(lease_seconds)s),
    next_attempt_at = statement_timestamp() + make_interval(secs => %(lease_seconds)s)
WHERE m.outbox_message_id = ANY (ARRAY(
    SELECT locked.outbox_message_id
    FROM unnest(%(destinations)s::text[]) AS d (name)
    CROSS JOIN LATERAL (
        -- claim.sql passes suspects over, so they gather at the head: looking there finds them without a scan
        SELECT q.outbox_message_id, q.lost_leases, q.status FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
          AND q.next_attempt_at <= statement_timestamp()
        ORDER BY q.next_attempt_at, q.created_at, q.outbox_message_id
        LIMIT 1000
    ) AS head
    CROSS JOIN LATERAL (
        SELECT q.outbox_message_id FROM outbox_messages AS q
        WHERE q.outbox_message_id = head.outbox_message_id
          AND q.status IN ('Pending', 'Processing') AND q.next_attempt_at <= statement_timestamp()
          AND q.attempt_count < %(max_attempts)s
          AND coalesce(q.redriven_at, q.created_at) > statement_timestamp() - make_interval(secs => %(give_up_seconds)s)
          AND q.lost_leases + (q.status = 'Processing')::integer >= 2
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS locked
    WHERE head.lost_leases + (head.status = 'Processing')::integer >= 2
    LIMIT 1
))
RETURNING
    m.outbox_message_id, m.lease_token, m.event_type, m.destination, m.attempt_count, m.traceparent, m.ordering_key,
    CASE WHEN octet_length(m.payload::text) <= %(max_payload_bytes)s THEN m.payload::text END AS payload,
    to_char(m.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
    extract(epoch FROM statement_timestamp() - m.created_at)::float8 AS age_seconds,
    extract(epoch FROM statement_timestamp() - coalesce(m.redriven_at, m.created_at))::float8 AS tried_seconds,
    extract(epoch FROM statement_timestamp())::float8 AS claimed_at
