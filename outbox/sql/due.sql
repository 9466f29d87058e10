-- When the rows at work become claimable next: whether one is within `soon`, and how long until the next after that.
SELECT
    coalesce(bool_or(soon.yes), false) AS soon,
    extract(epoch FROM min(later.next_attempt_at) - statement_timestamp())::float8 AS next_in
FROM unnest(%(destinations)s::text[]) AS d (name)
LEFT JOIN LATERAL (
    SELECT true AS yes FROM outbox_messages AS q
    WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
      AND q.next_attempt_at <= statement_timestamp() + make_interval(secs => %(soon_seconds)s)
    ORDER BY q.next_attempt_at LIMIT 1
) AS soon ON true
LEFT JOIN LATERAL (
    SELECT q.next_attempt_at FROM outbox_messages AS q
    WHERE q.destination = d.name AND q.status IN ('Pending', 'Processing')
      AND q.next_attempt_at > statement_timestamp() + make_interval(secs => %(soon_seconds)s)
      AND q.next_attempt_at <= statement_timestamp() + make_interval(secs => %(horizon_seconds)s)
    ORDER BY q.next_attempt_at LIMIT 1
) AS later ON true
