-- Limits of this transaction alone (SET LOCAL), which PgBouncer's transaction mode accepts.
SELECT
    set_config('statement_timeout', %(statement_ms)s::text, true),
    set_config('lock_timeout', %(lock_ms)s::text, true),
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, true)
