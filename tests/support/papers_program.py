"""The paper's 0-1 program as the paper solved it: by GLPK, one variable for each kernel and configuration."""

import swiglpk as glpk

MIB = 2**20


def glpk_optimum(given_choices, total):
    """Solve the paper's 0-1 program (equations 1 to 4), one variable per kernel and configuration, by GLPK."""
    fronts = [choice.desirable for choice in given_choices for _ in range(choice.count)]
    problem = glpk.glp_create_prob()
    glpk.glp_term_out(glpk.GLP_OFF)
    glpk.glp_add_rows(problem, len(fronts) + 1)
    for row in range(1, len(fronts) + 1):
        glpk.glp_set_row_bnds(problem, row, glpk.GLP_FX, 1.0, 1.0)
    limit_row = len(fronts) + 1
    glpk.glp_set_row_bnds(problem, limit_row, glpk.GLP_UP, 0.0, total / MIB)
    entries = []
    for row, front in enumerate(fronts, start=1):
        for configuration in front:
            column = glpk.glp_add_cols(problem, 1)
            glpk.glp_set_col_kind(problem, column, glpk.GLP_BV)
            glpk.glp_set_obj_coef(problem, column, configuration.time_ms)
            entries += [(row, column, 1.0), (limit_row, column, configuration.workspace_bytes / MIB)]
    rows, columns = glpk.intArray(len(entries) + 1), glpk.intArray(len(entries) + 1)
    values = glpk.doubleArray(len(entries) + 1)
    for index, (row, column, value) in enumerate(entries, start=1):
        rows[index], columns[index], values[index] = row, column, value
    glpk.glp_load_matrix(problem, len(entries), rows, columns, values)
    parameters = glpk.glp_iocp()
    glpk.glp_init_iocp(parameters)
    parameters.presolve = glpk.GLP_ON
    parameters.msg_lev = glpk.GLP_MSG_OFF
    assert glpk.glp_intopt(problem, parameters) == 0
    assert glpk.glp_mip_status(problem) == glpk.GLP_OPT
    optimum = glpk.glp_mip_obj_val(problem)
    glpk.glp_delete_prob(problem)
    return optimum
