"""Create the shop's tables and their first rows.

The rows are made on the server from the row number alone, so they are the same each time. Large values are stored
EXTERNAL, so that an update that does not touch them arrives without them.
"""

from __future__ import annotations

import psycopg
from psycopg.rows import TupleRow

Connection = psycopg.Connection[TupleRow]

TABLES = (("public", "customers"), ("public", "products"), ("public", "orders"), ("public", "order_items"))

SCHEMA_SQL = """
CREATE TYPE order_status AS ENUM ('new', 'paid', 'packed', 'sent', 'returned', 'on hold');

CREATE TABLE customers (
    id           bigint PRIMARY KEY,
    reference    uuid NOT NULL UNIQUE,
    name         text NOT NULL,
    email        varchar(120),
    active       boolean NOT NULL DEFAULT true,
    born         date,
    credit       numeric(12, 2) NOT NULL DEFAULT 0,
    tags         text[],
    profile      jsonb NOT NULL DEFAULT '{}',
    notes        text,
    joined_at    timestamptz NOT NULL
);
ALTER TABLE customers ALTER COLUMN notes SET STORAGE EXTERNAL;

CREATE TABLE products (
    sku          text PRIMARY KEY,
    title        text NOT NULL,
    price        numeric(10, 2) NOT NULL,
    weight_kg    double precision,
    stock        integer NOT NULL,
    sizes        integer[],
    image        bytea,
    description  text NOT NULL,
    available    boolean,
    updated_at   timestamp NOT NULL
);
ALTER TABLE products ALTER COLUMN description SET STORAGE EXTERNAL;
ALTER TABLE products ALTER COLUMN image SET STORAGE EXTERNAL;

CREATE TABLE orders (
    id           bigint PRIMARY KEY,
    customer_id  bigint NOT NULL REFERENCES customers ON UPDATE CASCADE,
    status       order_status NOT NULL DEFAULT 'new',
    placed_at    timestamptz NOT NULL,
    deliver_on   date,
    total        numeric(14, 4) NOT NULL DEFAULT 0,
    details      jsonb,
    message      text
);
ALTER TABLE orders ALTER COLUMN message SET STORAGE EXTERNAL;
CREATE INDEX orders_of_customer ON orders (customer_id);

CREATE TABLE order_items (
    order_id     bigint REFERENCES orders ON UPDATE CASCADE ON DELETE CASCADE,
    line         smallint,
    sku          text NOT NULL REFERENCES products ON UPDATE CASCADE,
    quantity     integer NOT NULL,
    unit_price   numeric(10, 2) NOT NULL,
    discount     real,
    gift         boolean NOT NULL DEFAULT false,
    PRIMARY KEY (order_id, line)
);
CREATE INDEX order_items_of_product ON order_items (sku);
"""

CUSTOMERS, PRODUCTS, ORDERS, LINES_PER_ORDER = 1_000, 400, 2_000, 2


# Made on the server, from the row number alone: fast at any scale, and the same each time.
_SEED_SQL = """
INSERT INTO customers
SELECT i, md5('customer' || i)::uuid, 'Customer ' || i,
       CASE WHEN i %% 7 > 0 THEN 'c' || i || '@example.org' END,
       i %% 5 > 0, CASE WHEN i %% 6 > 0 THEN date '1950-01-01' + (i * 37 %% 20000)::int END,
       (i * 7919 %% 500000) / 100.0,
       CASE i %% 4 WHEN 0 THEN NULL WHEN 1 THEN '{}'::text[] WHEN 2 THEN ARRAY['vip', NULL, 'comma, "quote"']
            ELSE ARRAY['n' || i, ''] END,
       jsonb_build_object('level', i %% 9, 'city', 'Zürich', 'opt_in', i %% 2 = 0),
       CASE i %% 3 WHEN 0 THEN repeat(md5('notes' || i), 140) WHEN 1 THEN 'short note ' || i END,
       timestamptz '2024-01-01 00:00:00.000001+00' + i * interval '1 hour 1 microsecond'
FROM generate_series(1, %(customers)s) AS i;

INSERT INTO products
SELECT 'SKU-' || lpad(i::text, 6, '0'), 'Product ' || i || E' \\\\ "new"\\nline',
       (i * 104729 %% 90000) / 100.0 + 1,
       CASE i %% 8 WHEN 0 THEN NULL WHEN 1 THEN 'NaN'::float8 ELSE i / 7.0::float8 END, i %% 500,
       CASE i %% 3 WHEN 0 THEN NULL WHEN 1 THEN '{}'::int[] ELSE ARRAY[i, NULL, -i]::int[] END,
       CASE WHEN i %% 2 = 0 THEN decode(repeat(md5('image' || i), 160), 'hex') END,
       repeat(md5('description' || i), 150 + (i %% 100)::int), CASE WHEN i %% 10 > 0 THEN i %% 3 > 0 END,
       timestamp '2024-06-01 12:00:00.5' + i * interval '1 minute'
FROM generate_series(1, %(products)s) AS i;

INSERT INTO orders
SELECT i, 1 + i * 31 %% %(customers)s, (enum_range(NULL::order_status))[1 + i %% 6],
       timestamptz '2025-01-01 08:00:00+00' + i * interval '7 minutes',
       CASE WHEN i %% 4 > 0 THEN date '2025-01-05' + (i %% 300)::int END, (i * 6007 %% 1000000) / 7.0,
       CASE WHEN i %% 3 > 0 THEN jsonb_build_object('gift', i %% 2 = 0, 'n', jsonb_build_array(i, NULL)) END,
       CASE WHEN i %% 5 = 0 THEN repeat(md5('message' || i), 130) END
FROM generate_series(1, %(orders)s) AS i;

INSERT INTO order_items
SELECT i, line, 'SKU-' || lpad((1 + (i * 13 + line * 7) %% %(products)s)::text, 6, '0'), 1 + (i + line) %% 9,
       (i * 7 %% 9000) / 100.0, CASE WHEN i %% 3 > 0 THEN (i %% 30) / 100.0 END, i %% 11 = 0
FROM generate_series(1, %(orders)s) AS i, generate_series(1, %(lines)s) AS line;
"""


def load_first_rows(connection: Connection, scale: float = 1.0) -> None:
    """Load the shop's first rows, in one transaction: 7,400 of them at scale 1."""
    sizes = {"customers": CUSTOMERS, "products": PRODUCTS, "orders": ORDERS}
    counts = {name: max(20, round(size * scale)) for name, size in sizes.items()}
    with connection.transaction(), psycopg.ClientCursor(connection) as cursor:
        cursor.execute(_SEED_SQL, {**counts, "lines": LINES_PER_ORDER})
