"""Execution: a plan of a training step becomes straight-line code, which runs in the place of the model.

model, sample, loss -> the operators of the step and its graph      `tracing`, `step_program`
a plan of that graph -> Python code with explicit frees and copies  `generator`
the code with what it runs on                                       `planned_run`
the code as nodes of autograd, one or one for each part of backward `step_nodes`
that as a module                                                    `fitted_step`
the first step, which decides on the plan of those after it         `first_step`
all of it in one call                                               `fit`
"""
