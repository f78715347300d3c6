"""The tables of the database."""

SCHEMA_VERSION = 6
"""The version of the tables below. A file keeps it as its user_version."""

_TABLES = """
CREATE TABLE machines (key BLOB PRIMARY KEY, conditions TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE problems (key BLOB PRIMARY KEY, problem TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE measurements (
    machine BLOB NOT NULL,
    problem BLOB NOT NULL,
    api TEXT NOT NULL,
    algorithm TEXT NOT NULL,
    notes TEXT NOT NULL,
    compiles INTEGER NOT NULL,
    status TEXT NOT NULL,
    time_ms REAL NOT NULL,
    spread_ms REAL NOT NULL,
    samples INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    workspace_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL,
    measured_at TEXT NOT NULL,
    PRIMARY KEY (machine, problem, api, algorithm)
) WITHOUT ROWID;
CREATE TABLE explorations (
    machine BLOB NOT NULL,
    problem BLOB NOT NULL,
    request TEXT NOT NULL,
    names TEXT NOT NULL,
    sizes TEXT NOT NULL,
    explored_at TEXT NOT NULL,
    divisions TEXT NOT NULL,
    PRIMARY KEY (machine, problem, request)
) WITHOUT ROWID;
"""

STATEMENTS = tuple(statement.strip() for statement in _TABLES.split(";") if statement.strip())
"""What creates the tables, as SQLite keeps it too."""
