"""The backlogs that the PostgreSQL benches drain.

A workload is written in two steps. `tables` makes tables, rows that exist beforehand, and the publication;
then the slots are made; then `changes` writes the backlog, which is therefore the only thing any slot has
to deliver. `rows` is exactly how many row changes the publication delivers, and both sides must deliver exactly that.

Each is a function of the row changes that are wanted at least: it fills its last transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

PUBLICATION = "bench"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a backlog consists of. `changes` is one statement: a DO block may commit only at top level."""

    title: str
    rows: int
    tables: str
    changes: str


_ORDERS_COLUMNS = """
    id bigint primary key, customer_id int, status text, amount numeric(12, 2), note text,
    created_at timestamptz, flag boolean, score double precision
"""
_ORDERS_ROW = """
    g, g % 10000, 'status-' || (g % 7), (g % 100000) / 100.0, 'some note text number ' || g, now(), g % 2 = 0, g * 1.5
"""
STREAM_TRANSACTION_ROWS = 5_000


def orders_table(name: str, rows: int) -> str:
    """Make a table of pg-stream's columns, with so many rows."""
    return (
        f"create table {name} ({_ORDERS_COLUMNS}); "
        f"insert into {name} select {_ORDERS_ROW} from generate_series(1, {rows}) g"
    )


def inserts(rows: int) -> Workload:
    """Inserts of 8 columns in transactions of 5,000."""
    transactions = _transactions(rows, STREAM_TRANSACTION_ROWS)
    rows = transactions * STREAM_TRANSACTION_ROWS
    return Workload(
        title=f"{rows:,} inserts of 8 columns in transactions of {STREAM_TRANSACTION_ROWS:,}",
        rows=rows,
        tables=f"create table orders ({_ORDERS_COLUMNS}); create publication {PUBLICATION} for table orders;",
        changes=f"""
            do $$ begin
              for i in 0..{transactions - 1} loop
                insert into orders select {_ORDERS_ROW}
                  from generate_series(i * {STREAM_TRANSACTION_ROWS} + 1, (i + 1) * {STREAM_TRANSACTION_ROWS}) g;
                commit;
              end loop;
            end $$
        """,
    )


MIX_ROWS_BEFORE = 5_000


def mix(rows: int) -> Workload:
    """Inserts, updates and deletes of pg-stream's columns as 50, 40 and 10 of a hundred, one row a statement.

    Ten changes make a turn: an insert, then an update, four times over, then an insert and a delete. What is updated or
    deleted is the row that was inserted 5,000 inserts before, so every statement hits exactly one row.
    """
    transactions = _transactions(rows, STREAM_TRANSACTION_ROWS)
    rows = transactions * STREAM_TRANSACTION_ROWS
    first = MIX_ROWS_BEFORE + 1
    return Workload(
        title=(
            f"{rows // 2:,} inserts, {rows * 2 // 5:,} updates and {rows // 10:,} deletes of 8 columns, one after the "
            f"other in transactions of {STREAM_TRANSACTION_ROWS:,}"
        ),
        rows=rows,
        tables=f"""
            create table orders ({_ORDERS_COLUMNS});
            insert into orders select {_ORDERS_ROW} from generate_series(1, {MIX_ROWS_BEFORE}) g;
            analyze;
            create publication {PUBLICATION} for table orders;
        """,
        changes=f"""
            do $$ begin
              for g in {first}..{first + rows // 2 - 1} loop
                insert into orders values ({_ORDERS_ROW});
                if g % 5 > 0 then
                  update orders set status = 'changed', amount = amount + 1, created_at = now()
                    where id = g - {MIX_ROWS_BEFORE};
                else
                  delete from orders where id = g - {MIX_ROWS_BEFORE};
                end if;
                if g % {STREAM_TRANSACTION_ROWS // 2} = 0 then
                  commit;
                end if;
              end loop;
            end $$
        """,
    )


# Transaction i writes one row of table i % 20. Of ten transactions on a table seven insert, two update and
# one deletes a row inserted just before, so every statement hits exactly one row.
def oltp(rows: int) -> Workload:
    """One-row transactions over 20 tables."""
    return Workload(
        title=f"{rows:,} one-row transactions over 20 tables: 70 % inserts, 20 % updates, 10 % deletes",
        rows=rows,
        tables="""
            do $$ begin
              for t in 0..19 loop
                execute format(
                  'create table t%s (id bigint primary key, account int, state text, amount numeric(12, 2), '
                  'changed_at timestamptz)', t);
              end loop;
            end $$;
            create publication bench for tables in schema public;
        """,
        changes=f"""
            do $$
            declare
              n int;
            begin
              for i in 0..{rows - 1} loop
                n := i / 20;
                if n % 10 < 7 then
                  execute format('insert into t%s values ($1, $1 %% 1000, ''open'', $1 / 100.0, now())', i % 20)
                    using n;
                elsif n % 10 < 9 then
                  execute format('update t%s set state = ''paid'', changed_at = now() where id = $1', i % 20)
                    using n - 1 - 2 * (n % 10 - 7);
                else
                  execute format('delete from t%s where id = $1', i % 20) using n - 5;
                end if;
                commit;
              end loop;
            end $$
        """,
    )


MIXED_TRANSACTION_ROWS = 200


# Each transaction makes 200 changes, and the rows last for 1,000 transactions. In every table the lower half of the
# ids is deleted, a few in each transaction, and the upper half is updated over and over. The bodies are 4 kB, and
# EXTERNAL keeps them from being compressed, so they live in the TOAST table; all updates but `documents.body`'s own
# leave them unchanged.
def mixed(rows: int) -> Workload:
    """Updates and deletes over four tables, with large and absent values; at most 200,000."""
    transactions = _transactions(rows, MIXED_TRANSACTION_ROWS)
    updates, deletes = 170 * transactions, 30 * transactions
    return Workload(
        title=(
            f"{updates:,} updates and {deletes:,} deletes in {transactions:,} transactions over 4 tables: two with "
            "4 kB TOASTed texts, two with REPLICA IDENTITY FULL, one of them both"
        ),
        rows=updates + deletes,
        tables="""
            create table documents (
                id bigint primary key, title text, body text, revision int, changed_at timestamptz
            );
            create table articles (id bigint primary key, title text, body text, views int, rating numeric(5, 2));
            create table accounts (
                id bigint, owner text, balance numeric(14, 2), active boolean, changed_at timestamptz
            );
            create table stock (shelf int, item int, amount int, primary key (shelf, item));
            create index on accounts (id);
            alter table documents alter column body set storage external;
            alter table articles alter column body set storage external;
            alter table articles replica identity full;
            alter table accounts replica identity full;
            insert into documents select g, 'document ' || g, repeat(md5(g::text), 128), 0, now()
              from generate_series(0, 19999) g;
            insert into articles select g, 'article ' || g, repeat(md5(g::text), 128), 0, 2.5
              from generate_series(0, 9999) g;
            insert into accounts select g, 'owner ' || g, g / 100.0, true, now() from generate_series(0, 19999) g;
            insert into stock select g / 100, g, 10 from generate_series(0, 9999) g;
            analyze;
            create publication bench for table documents, articles, accounts, stock;
        """,
        changes=f"""
            do $$ begin
              for i in 0..{transactions - 1} loop
                update documents set revision = revision + 1, changed_at = now()
                  where id >= 10000 + i * 80 % 10000 and id < 10080 + i * 80 % 10000;
                update documents set body = repeat(md5(i::text), 128)
                  where id >= 10000 + i * 10 and id < 10010 + i * 10;
                delete from documents where id >= i * 10 and id < i * 10 + 10;
                update articles set views = views + 1, rating = 3.5
                  where id >= 5000 + i * 20 % 5000 and id < 5020 + i * 20 % 5000;
                delete from articles where id >= i * 5 and id < i * 5 + 5;
                update accounts set balance = balance + 1, changed_at = now()
                  where id >= 10000 + i * 50 % 10000 and id < 10050 + i * 50 % 10000;
                delete from accounts where id >= i * 10 and id < i * 10 + 10;
                update stock set amount = amount - 1
                  where shelf = 50 + i % 500 / 10 and item >= 5000 + i % 500 * 10 and item < 5010 + i % 500 * 10;
                delete from stock where shelf = i / 20 and item >= i * 5 and item < i * 5 + 5;
                commit;
              end loop;
            end $$
        """,
    )


# Name, type, and the value in row g: of seven columns some values are null.
_TYPES: tuple[tuple[str, str, str], ...] = (
    ("id", "bigint primary key", "g"),
    ("small", "smallint", "g % 30000 - 15000"),
    ("number", "integer", "g % 60000 * 7919 - 200000000"),
    ("big", "bigint", "g * 1000003::bigint"),
    ("ratio", "real", "g % 1000 / 7.0"),
    ("score", "double precision", "case when g % 5 > 0 then sqrt(g) end"),
    ("amount", "numeric(12, 2)", "g % 1000000 / 100.0"),
    ("exact", "numeric", "g * 1.000000000001"),
    ("label", "text", "'label number ' || g"),
    ("code", "varchar(20)", "'C-' || g % 5000"),
    ("fixed", "char(8)", "lpad((g % 1000)::text, 6, 'x')"),
    ("flag", "boolean", "g % 3 = 0"),
    ("raw", "bytea", "decode(md5(g::text), 'hex')"),
    ("day", "date", "date '2000-01-01' + g % 9000"),
    ("made_at", "timestamp", "timestamp '2020-01-01' + g * interval '1.234567 s'"),
    ("seen_at", "timestamptz", "now() - g * interval '0.654321 s'"),
    ("clock", "time", "time '00:00' + g * interval '1.5 s'"),
    ("zoned", "timetz", "timetz '00:00+02' + g * interval '1.5 s'"),
    ("took", "interval", "case when g % 6 > 0 then make_interval(days => g % 40, secs => g % 86400 + 0.25) end"),
    ("uid", "uuid", "md5(g::text)::uuid"),
    ("doc", "json", "json_build_object('id', g, 'kind', 'order', 'paid', g % 2 = 0)"),
    ("tree", "jsonb", "jsonb_build_object('id', g, 'tags', array['new', 'large'], 'price', g % 1000 / 10.0)"),
    ("host", "inet", "case when g % 10 > 0 then inet '10.0.0.0' + g % 65536 end"),
    ("net", "cidr", "network(set_masklen(inet '10.0.0.0' + g % 65536, 24))"),
    ("mac", "macaddr", "('08002b' || lpad(to_hex(g % 16777216), 6, '0'))::macaddr"),
    ("ints", "int[]", "array[g, g % 10, null, g % 1000]"),
    ("texts", "text[]", "array['tag' || g % 10, 'some, quoted text', null]"),
    ("amounts", "numeric(8, 2)[]", "array[g % 1000 / 10.0, g % 7]"),
    ("moments", "timestamptz[]", "array[now(), now() - g * interval '1 s']"),
    ("mood", "mood", "case when g % 7 > 0 then (array['sad', 'ok', 'happy'])[g % 3 + 1]::mood end"),
    ("share", "percent", "g % 101"),
    ("span", "int4range", "int4range(g % 100, g % 100 + 10)"),
    ("period", "tstzrange", "tstzrange(now() - interval '1 hour', now())"),
    ("place", "point", "point(g % 360 - 180, g % 180 / 2.0)"),
    ("price", "money", "(g % 100000 / 100.0)::money"),
    ("bits", "bit(8)", "(g % 256)::bit(8)"),
    ("words", "tsvector", "to_tsvector('simple', 'some words about number ' || g)"),
    ("note", "text", "case when g % 4 = 0 then 'a note of some length about number ' || g end"),
    ("discount", "numeric(5, 2)", "case when g % 2 = 0 then g % 100 / 4.0 end"),
    ("closed_at", "timestamptz", "case when g % 3 = 0 then now() end"),
)


TYPES_INSERTS, TYPES_UPDATES = 800, 200


def types(rows: int) -> Workload:
    """Rows of 40 columns of every common type, in transactions of 800 inserts and then 200 updates of these."""
    transactions = _transactions(rows, TYPES_INSERTS + TYPES_UPDATES)
    inserts, updates = transactions * TYPES_INSERTS, transactions * TYPES_UPDATES
    return Workload(
        title=f"{inserts:,} inserts and {updates:,} updates of {len(_TYPES)} columns in {transactions:,} transactions",
        rows=inserts + updates,
        tables=f"""
            create type mood as enum ('sad', 'ok', 'happy');
            create domain percent as int check (value between 0 and 100);
            create table samples ({", ".join(f"{name} {kind}" for name, kind, _ in _TYPES)});
            create publication {PUBLICATION} for table samples;
        """,
        changes=f"""
            do $$
            declare
              before int;
            begin
              for i in 0..{transactions - 1} loop
                before := i * {TYPES_INSERTS};
                insert into samples select {", ".join(value for _, _, value in _TYPES)}
                  from generate_series(before + 1, before + {TYPES_INSERTS}) g;
                update samples set amount = amount + 1, seen_at = now(), texts = array['changed'], closed_at = null
                  where id > before and id <= before + {TYPES_UPDATES};
                commit;
              end loop;
            end $$
        """,
    )


SPREAD_TRANSACTION_ROWS = 1_000


def one_transaction(rows: int) -> Workload:
    """So many inserts of pg-stream's columns, all in one transaction; the ids count from 1."""
    return Workload(
        title=f"{rows:,} inserts of 8 columns in one transaction",
        rows=rows,
        tables=f"create table orders ({_ORDERS_COLUMNS}); create publication {PUBLICATION} for table orders;",
        changes=f"insert into orders select {_ORDERS_ROW} from generate_series(1, {rows}) g",
    )


def spread(name: str, rows: int, tables: int) -> Workload:
    """Inserts of pg-stream's columns in transactions of 1,000 rows, each spread evenly over the tables.

    Tables and publication are named after the workload, so that several can be in one database and each
    publication delivers its own alone.
    """
    share = SPREAD_TRANSACTION_ROWS // tables
    row = _ORDERS_ROW.replace("'", "''")
    return Workload(
        title=f"{rows:,} inserts of 8 columns over {tables} table{'s' * (tables > 1)}, in transactions of 1,000",
        rows=rows,
        tables=f"""
            do $$
            declare
              names text;
            begin
              for t in 0..{tables - 1} loop
                execute 'create table {name}_' || t || ' ({_ORDERS_COLUMNS})';
              end loop;
              select string_agg('{name}_' || t, ', ') into names from generate_series(0, {tables - 1}) t;
              execute 'create publication {name} for table ' || names;
            end $$
        """,
        changes=f"""
            do $$ begin
              for i in 0..{rows // SPREAD_TRANSACTION_ROWS - 1} loop
                for t in 0..{tables - 1} loop
                  execute 'insert into {name}_' || t || ' select {row} from generate_series($1, $2) g'
                    using i * {share} + 1, (i + 1) * {share};
                end loop;
                commit;
              end loop;
            end $$
        """,
    )


def _transactions(rows: int, rows_each: int) -> int:
    """How many of that size hold so many rows."""
    return -(-rows // rows_each)
