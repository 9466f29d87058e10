-- Let one transaction at a time enqueue for this key, until it commits: order_no then grows in the order of commits.
SELECT pg_advisory_xact_lock(hashtextextended(%(ordering_key)s, 20261203))
