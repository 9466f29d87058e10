-- Store an event: one Pending row for each destination, unless one with its dedupe_key is there.
-- The id is a UUIDv7 by the database's clock; PostgreSQL has uuidv7() only from 18 on, so it is put together here:
-- 48 bits of Unix milliseconds over a random v4, whose version digit then becomes 7.
INSERT INTO outbox_messages (
    outbox_message_id, event_id, event_type, destination, payload, traceparent,
    ordering_key, order_no, is_head, dedupe_key, next_attempt_at, redriven_at
)
SELECT
    encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid,
    %(event_id)s, %(event_type)s, d.name, %(payload)s::jsonb, %(traceparent)s,
    k.ordering_key,
    CASE WHEN k.ordering_key IS NOT NULL THEN nextval('outbox_order_no') END,
    k.ordering_key IS NOT NULL AND NOT EXISTS (
        SELECT FROM outbox_messages AS q
        WHERE q.destination = d.name AND q.ordering_key = k.ordering_key AND q.status IN ('Pending', 'Processing')
    ),
    %(dedupe_key)s,
    coalesce(later.at, now()),
    later.at  -- the give-up time starts when it is due first
FROM unnest(%(destinations)s::text[]) AS d (name)
CROSS JOIN (SELECT %(ordering_key)s::text) AS k (ordering_key)
CROSS JOIN (
    SELECT coalesce(%(due_at)s::timestamptz, statement_timestamp() + make_interval(secs => %(delay_seconds)s))
) AS later (at)
ON CONFLICT (destination, dedupe_key) WHERE dedupe_key IS NOT NULL AND discarded_at IS NULL DO NOTHING
RETURNING destination, outbox_message_id
