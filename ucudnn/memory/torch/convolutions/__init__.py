"""Convolutions of a fitted step: what each can choose from, and the kernels that run exactly what a plan chose.

the step's operators -> the kernels that ucudnn computes in their place    `step_kernel`
measured on the step's device -> desirable sets, for policies              `convolution_choices`
a plan's configurations -> functions in the place of PyTorch's operators   `planned_convolution`
"""
