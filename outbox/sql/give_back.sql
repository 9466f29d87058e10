-- Give claimed rows back, due now; an attempt that never started costs none.
UPDATE outbox_messages AS m SET
    status = 'Pending',
    attempt_count = m.attempt_count - 1,
    next_attempt_at = statement_timestamp(),
    lease_token = NULL,
    lease_expires_at = NULL
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS r (id, token)
WHERE m.outbox_message_id = r.id
  AND m.lease_token = r.token  -- fencing: the row is still under this very claim
RETURNING m.outbox_message_id
