-- Ordering and deduplication, for the messages that ask for them; the others pay one test of a null.
ALTER TABLE outbox_messages
    ADD COLUMN ordering_key text,                            -- one destination's messages with the same key go one by one
    ADD COLUMN order_no     bigint,                          -- their order: that of the commits, see lock_key.sql
    ADD COLUMN is_head      boolean NOT NULL DEFAULT false,  -- nothing unfinished is before it: it may be claimed
    ADD COLUMN dedupe_key   text,
    ADD COLUMN discarded_at timestamptz;                     -- an operator gave it up; its dedupe_key is free again

CREATE SEQUENCE outbox_order_no OWNED BY outbox_messages.order_no;

-- Serves the search for a key's next message.
CREATE INDEX outbox_messages_ordered ON outbox_messages (destination, ordering_key, order_no)
    WHERE ordering_key IS NOT NULL AND status IN ('Pending', 'Processing');

-- Serves promote.sql: keyed messages of which nobody has yet found out whether they are a head.
CREATE INDEX outbox_messages_unsorted ON outbox_messages (next_attempt_at)
    WHERE ordering_key IS NOT NULL AND NOT is_head AND status = 'Pending';

CREATE UNIQUE INDEX outbox_messages_dedupe ON outbox_messages (destination, dedupe_key)
    WHERE dedupe_key IS NOT NULL AND discarded_at IS NULL;
