"""The integer program of a workspace division, stated to HiGHS and to GLPK without ucudnn.

Identical kernels share one integer variable for each point of their front, bounded by their number. Each program is
stated with the solver's own arrays, which is faster than through a modelling language. Bytes stand in MiB, because the
solvers' tolerances are absolute.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MIB = 2**20


@dataclass(frozen=True)
class Answer:
    """What a solver answered: the points that kernels take, how many take each, and whether it ended in time."""

    counts: list
    ended: bool


def by_fronts(values, lengths):
    """Return for each front how many kernels take each point, without points that no kernel takes."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [{index: count for index, count in enumerate(values[start:end]) if count} for start, end in pairwise(ends)]


def highs_division(fronts, counts, total, seconds=float("inf")):
    """Solve the grouped program by HiGHS on one thread, with no gap, in the solver's default settings otherwise."""
    import highspy

    lengths = [len(sizes) for sizes, _ in fronts]
    columns, rows = sum(lengths), len(fronts)
    entries = np.empty(2 * columns, dtype=np.int32)
    entries[::2], entries[1::2] = np.repeat(np.arange(rows), lengths), rows
    values = np.ones(2 * columns)
    values[1::2] = np.concatenate([np.array(sizes, dtype=np.float64) for sizes, _ in fronts]) / MIB
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = columns, rows + 1
    program.col_cost_ = np.concatenate([np.array(times) for _, times in fronts])
    program.col_lower_, program.col_upper_ = np.zeros(columns), np.repeat(np.array(counts, dtype=np.float64), lengths)
    program.row_lower_ = np.append(np.array(counts, dtype=np.float64), -highspy.kHighsInf)
    program.row_upper_ = np.append(np.array(counts, dtype=np.float64), total / MIB)
    program.integrality_ = [highspy.HighsVarType.kInteger] * columns
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_ = np.arange(0, 2 * columns + 1, 2, dtype=np.int32)
    program.a_matrix_.index_, program.a_matrix_.value_ = entries, values
    engine = highspy.Highs()
    for name, value in {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.0,
        "time_limit": seconds,
    }.items():
        engine.setOptionValue(name, value)
    engine.passModel(program)
    engine.run()
    taken = np.rint(engine.getSolution().col_value).astype(np.int64).tolist()
    return Answer(by_fronts(taken, lengths), engine.getModelStatus() == highspy.HighsModelStatus.kOptimal)


def glpk_division(fronts, counts, total, seconds=None):
    """Solve the grouped program by GLPK with its presolver, in its default settings otherwise."""
    import swiglpk as glpk

    lengths = [len(sizes) for sizes, _ in fronts]
    columns, limit_row = sum(lengths), len(fronts) + 1
    problem = glpk.glp_create_prob()
    glpk.glp_term_out(glpk.GLP_OFF)
    glpk.glp_add_rows(problem, limit_row)
    glpk.glp_add_cols(problem, columns)
    glpk.glp_set_row_bnds(problem, limit_row, glpk.GLP_UP, 0.0, total / MIB)
    rows, indices = glpk.intArray(2 * columns + 1), glpk.intArray(2 * columns + 1)
    values = glpk.doubleArray(2 * columns + 1)
    column = 0
    for row, ((sizes, times), count) in enumerate(zip(fronts, counts, strict=True), start=1):
        glpk.glp_set_row_bnds(problem, row, glpk.GLP_FX, count, count)
        for size, time in zip(sizes, times, strict=True):
            column += 1
            glpk.glp_set_col_kind(problem, column, glpk.GLP_IV)
            glpk.glp_set_col_bnds(problem, column, glpk.GLP_DB, 0.0, count)
            glpk.glp_set_obj_coef(problem, column, time)
            rows[2 * column - 1], indices[2 * column - 1], values[2 * column - 1] = row, column, 1.0
            rows[2 * column], indices[2 * column], values[2 * column] = limit_row, column, size / MIB
    glpk.glp_load_matrix(problem, 2 * columns, rows, indices, values)
    parameters = glpk.glp_iocp()
    glpk.glp_init_iocp(parameters)
    parameters.presolve, parameters.msg_lev = glpk.GLP_ON, glpk.GLP_MSG_OFF
    if seconds is not None:
        parameters.tm_lim = round(seconds * 1e3)
    glpk.glp_intopt(problem, parameters)
    taken = [round(glpk.glp_mip_col_val(problem, column)) for column in range(1, columns + 1)]
    ended = glpk.glp_mip_status(problem) == glpk.GLP_OPT
    glpk.glp_delete_prob(problem)
    return Answer(by_fronts(taken, lengths), ended)
