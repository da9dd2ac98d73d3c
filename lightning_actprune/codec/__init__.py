"""How tensors are compressed and read again: number formats, blocks, packed tensors, and what saves them for backward.

``formats`` and ``blocks`` hold the maths and a plain-torch version of all of it; ``dispatch`` chooses between that and
the Triton kernels, and keeps the kernels' bound launches; ``packed`` packs and unpacks; ``autograd`` is the frame of
every differentiable function of this package, and ``sharing`` lets layers with one input store it once.
"""
