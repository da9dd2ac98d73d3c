"""How tensors are compressed and read again: number formats, blocks, packed tensors, and what saves them for backward.

``formats`` and ``blocks`` hold the maths and a plain-torch version of all of it; ``dispatch`` chooses between that and
the Triton kernels, keeps the kernels' bound launches, and has the frame of every differentiable function of this
package; ``layout`` says in which order memory is read, ``packed`` packs and unpacks, and ``pack_cache`` lets layers
with one input store it once.
"""
