"""Gradient compression where the gradients are: on a GPU.

Residuals and momenta lie beside the parameters, all tensors are handled in one launch, and a step
waits for the device once, to learn how many elements were selected. Thresholds and their ages stay
on the host, in the state that the CPU's compressors have too: one small copy brings it to the
device at the beginning of a step, one brings what was found back.

`ops` says what is computed there; Triton kernels do it (`kernels.device`), or plain torch.
"""
