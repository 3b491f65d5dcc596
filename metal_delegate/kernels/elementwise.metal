// out[i] = expression(inputs[0][i], ...): one thread an element. The kernel of each expression is generated
// (exporter/msl_library.py); what all share is where the element of an operand lies. Dimensions that lie at one
// stride in all operands are one dimension by then, so that a contiguous chain is one multiplication.

inline long elementwise_offset(constant const ElementwiseParams& params, int operand, uint index) {
  if (params.rank == 1) return long(index) * params.strides[operand][0];
  return strided_offset(index, params.rank, params.sizes, params.strides[operand]);
}
