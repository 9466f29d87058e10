-- Keep the planner on the claimable index, whatever its statistics or a generic plan make it believe:
-- any other path reads or sorts the whole backlog.
SELECT
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_sort', 'off', true),
    set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true)
