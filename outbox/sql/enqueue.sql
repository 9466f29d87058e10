-- Store an event: one Pending row, due now, for each destination.
-- The id is a UUIDv7 by the database's clock; PostgreSQL has uuidv7() only from 18 on, so it is put together here:
-- 48 bits of Unix milliseconds over a random v4, whose version digit then becomes 7.
INSERT INTO outbox_messages (outbox_message_id, event_id, event_type, destination, payload, traceparent)
SELECT
    encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid,
    %(event_id)s, %(event_type)s, name, %(payload)s::jsonb, %(traceparent)s
FROM unnest(%(destinations)s::text[]) AS name
RETURNING destination, outbox_message_id
