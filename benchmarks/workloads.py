"""The backlogs that the PostgreSQL benches drain.

A workload is written in two steps. `tables` makes tables, rows that exist beforehand, and the publication;
then the slots are made; then `changes` writes the backlog, which is therefore the only thing any slot has
to deliver. `rows` is exactly how many row changes the publication delivers, and both sides are held to it.
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


STREAM = Workload(
    title="500,000 inserts of 8 columns in 100 transactions",
    rows=500_000,
    tables="""
        create table orders (
            id bigint primary key, customer_id int, status text, amount numeric(12, 2), note text,
            created_at timestamptz, flag boolean, score double precision
        );
        create publication bench for table orders;
    """,
    changes="""
        do $$ begin
          for i in 0..99 loop
            insert into orders
            select g, g % 10000, 'status-' || (g % 7), (g % 100000) / 100.0, 'some note text number ' || g,
                   now(), g % 2 = 0, g * 1.5
            from generate_series(i * 5000 + 1, (i + 1) * 5000) g;
            commit;
          end loop;
        end $$
    """,
)

# Transaction i writes one row of table i % 20. Of ten transactions on a table seven insert, two update and
# one deletes a row inserted just before, so every statement hits exactly one row.
OLTP = Workload(
    title="200,000 one-row transactions over 20 tables: 70 % inserts, 20 % updates, 10 % deletes",
    rows=200_000,
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
    changes="""
        do $$
        declare
          n int;
        begin
          for i in 0..199999 loop
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

# Each of 1,000 transactions makes 200 changes. In every table the lower half of the ids is deleted, a few in
# each transaction, and the upper half is updated over and over. The bodies are 4 kB, and EXTERNAL keeps them
# from being compressed, so they live in the TOAST table; all updates but `documents.body`'s own leave them
# unchanged.
MIXED = Workload(
    title=(
        "170,000 updates and 30,000 deletes in 1,000 transactions over 4 tables: two with 4 kB TOASTed "
        "texts, two with REPLICA IDENTITY FULL, one of them both"
    ),
    rows=200_000,
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
    changes="""
        do $$ begin
          for i in 0..999 loop
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

_ORDERS_COLUMNS = """
    id bigint primary key, customer_id int, status text, amount numeric(12, 2), note text,
    created_at timestamptz, flag boolean, score double precision
"""
_ORDERS_ROW = """
    g, g % 10000, 'status-' || (g % 7), (g % 100000) / 100.0, 'some note text number ' || g, now(), g % 2 = 0, g * 1.5
"""
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

    Tables and publication are named after the workload, so that several can stand in one database and each
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
