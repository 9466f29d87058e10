-- The outbox: one row for each destination of an event, written in the transaction of the business change.
CREATE TABLE outbox_messages (
    outbox_message_id     uuid PRIMARY KEY,                              -- the webhook-id of every attempt
    event_id              uuid NOT NULL DEFAULT gen_random_uuid(),       -- shared by the messages of one event
    event_type            text NOT NULL,
    destination           text NOT NULL,
    payload               jsonb NOT NULL,
    status                text NOT NULL DEFAULT 'Pending'
                          CHECK (status IN ('Pending', 'Processing', 'Processed', 'Failed')),
    attempt_count         integer NOT NULL DEFAULT 0,                    -- counted at the claim, so that a crash costs one
    lost_leases           integer NOT NULL DEFAULT 0,                    -- in a row: a result sets it back to 0
    next_attempt_at       timestamptz NOT NULL DEFAULT now(),            -- when the row becomes claimable next, whatever its status
    created_at            timestamptz NOT NULL DEFAULT now(),
    redriven_at           timestamptz,                                   -- the give-up time starts again here
    processing_started_at timestamptz,
    lease_expires_at      timestamptz,
    lease_token           uuid,                                          -- fencing: a result counts only under its claim's token
    processed_at          timestamptz,
    failed_at             timestamptz,
    last_error            text,
    failure_code          text,                                          -- machine-readable, with Failed
    traceparent           text,
    CHECK ((status = 'Processing') = (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL)),
    CHECK (status <> 'Processing' OR next_attempt_at = lease_expires_at),
    CHECK (status <> 'Processed' OR (processed_at IS NOT NULL AND last_error IS NULL)),
    CHECK (status <> 'Failed' OR last_error IS NOT NULL)
) WITH (
    -- Rows change state within seconds of their birth: vacuum by count, not by a share of the history.
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02
);

-- Serves the claim: due rows of a destination, oldest first, Pending and run-out Processing alike.
CREATE INDEX outbox_messages_claimable ON outbox_messages (destination, next_attempt_at, created_at, outbox_message_id)
    WHERE status IN ('Pending', 'Processing');

-- Serves operators: what failed, latest first.
CREATE INDEX outbox_messages_failed ON outbox_messages (failed_at) WHERE status = 'Failed';

-- Serves the purge at next to no cost for the settling of a row.
CREATE INDEX outbox_messages_processed ON outbox_messages USING brin (processed_at)
    WITH (pages_per_range = 32, autosummarize = on);

-- The seconds for which a doorbell is armed: one row, so that drains on all instances agree on one queue message each.
CREATE TABLE outbox_doorbell (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    armed    timestamptz[] NOT NULL DEFAULT '{}'
);
INSERT INTO outbox_doorbell DEFAULT VALUES;
