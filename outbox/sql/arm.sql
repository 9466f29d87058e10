-- Take the right to send the doorbell of one second, unless that second has one or an earlier one is still to ring.
UPDATE outbox_doorbell AS b SET armed =
    ARRAY(SELECT s FROM unnest(b.armed) AS s WHERE s > statement_timestamp() - interval '1 second') || want.second
FROM (
    SELECT date_trunc('second', statement_timestamp() + make_interval(secs => %(wait_seconds)s)) AS second
) AS want
WHERE NOT EXISTS (
    SELECT FROM unnest(b.armed) AS s
    WHERE s = want.second
       OR (s > statement_timestamp() AND s < want.second)  -- not heard yet, and the drain that it starts arms the next
)
RETURNING want.second
