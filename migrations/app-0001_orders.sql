-- The sample business table; an adopter's own tables go here instead.
CREATE TABLE orders (
    order_id     uuid PRIMARY KEY,
    status       text NOT NULL DEFAULT 'Pending' CHECK (status IN ('Pending', 'Completed', 'Cancelled')),
    created_at   timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    CHECK ((status = 'Completed') = (completed_at IS NOT NULL))
);
