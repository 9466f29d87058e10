-- Record the results of a batch in one statement and say which of them counted.
UPDATE outbox_messages AS m SET
    status = r.status,
    processed_at = CASE WHEN r.status = 'Processed' THEN statement_timestamp() END,
    failed_at = CASE WHEN r.status = 'Failed' THEN statement_timestamp() END,
    next_attempt_at = CASE WHEN r.status = 'Pending'
        THEN statement_timestamp() + make_interval(secs => r.delay_seconds) ELSE m.next_attempt_at END,
    last_error = r.error,
    failure_code = CASE WHEN r.status = 'Failed' THEN r.code END,
    lost_leases = 0,
    lease_token = NULL,
    lease_expires_at = NULL
FROM unnest(
    %(ids)s::uuid[], %(tokens)s::uuid[], %(statuses)s::text[], %(delays)s::float8[], %(codes)s::text[], %(errors)s::text[]
) AS r (id, token, status, delay_seconds, code, error)
WHERE m.outbox_message_id = r.id
  AND m.lease_token = r.token  -- fencing: the row is still under this very claim
RETURNING m.outbox_message_id
