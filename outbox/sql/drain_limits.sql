-- limits.sql for the drain's statements, and the planner kept on the claimable index whatever its statistics or a
-- generic plan make it believe: any other path reads or sorts the whole backlog. Before PostgreSQL 18 a path that is
-- switched off and taken all the same is costed at 10^10, which a server with JIT compiles: 0.3 s for a claim of 1 ms.
SELECT
    set_config('statement_timeout', %(statement_ms)s::text, true),
    set_config('lock_timeout', %(lock_ms)s::text, true),
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_sort', 'off', true),
    set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('jit', 'off', true)
