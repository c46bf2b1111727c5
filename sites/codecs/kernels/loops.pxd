"""The C types of loops.py: of arguments, results and variables."""

cimport cython
from libc.math cimport rintf

cdef extern from *:
    """
    #include <string.h>

    static inline float isthmus_float_of(unsigned int bits)
    { float value; memcpy(&value, &bits, sizeof value); return value; }
    static inline unsigned int isthmus_bits_of(float value)
    { unsigned int bits; memcpy(&bits, &value, sizeof bits); return bits; }
    static inline float isthmus_read_float(const void *at)
    { float value; memcpy(&value, at, sizeof value); return value; }
    static inline unsigned short isthmus_read_half(const void *at)
    { unsigned short half; memcpy(&half, at, sizeof half); return half; }
    """
    float isthmus_float_of(unsigned int bits) noexcept nogil
    unsigned int isthmus_bits_of(float value) noexcept nogil
    float isthmus_read_float(const void *at) noexcept nogil
    unsigned short isthmus_read_half(const void *at) noexcept nogil

ctypedef float[::1] WriteFloats
ctypedef const float[::1] ReadFloats
ctypedef unsigned short[::1] WriteHalves
ctypedef const unsigned short[::1] ReadHalves
ctypedef unsigned char[::1] WriteOctets
ctypedef const unsigned char[::1] ReadOctets

# ---------------------------------------------------------------- of scalars

cdef unsigned int bits_of(float value) noexcept nogil
cdef float float_of(unsigned int bits) noexcept nogil
cdef float float_at(ReadFloats values, Py_ssize_t i) noexcept nogil
cdef unsigned int half_at(ReadHalves halves, Py_ssize_t i) noexcept nogil
cdef int byte_at(ReadOctets octets, Py_ssize_t i) noexcept nogil
cdef unsigned int magnitude(float value) noexcept nogil
cdef float with_residual(float value, float residual) noexcept nogil
cdef float mean(float left, float right, float divisor) noexcept nogil
cdef double square(float value) noexcept nogil
@cython.locals(bits="unsigned int", upper="unsigned int", rounded="unsigned int")
cdef unsigned int half_of(float value) noexcept nogil
cdef float widened(unsigned int half) noexcept nogil
@cython.locals(exact="unsigned int", scale="unsigned int")
cdef unsigned int scale_of(unsigned int peak, float level_max) noexcept nogil
cdef float scale_at(ReadOctets scales, Py_ssize_t block) noexcept nogil
cdef float rounded_to_even(float value) noexcept nogil
cdef unsigned char to_byte(float level) noexcept nogil
cdef float from_int8(int code) noexcept nogil
cdef float from_lower(int code) noexcept nogil
cdef float from_upper(int code) noexcept nogil
@cython.locals(
    bits="unsigned int", size="unsigned int", sign=int, rounded=int, normal=int, small=float,
    subnormal=int,
)
cdef int to_fp8(float scaled) noexcept nogil
@cython.locals(size=int, normal=int, subnormal=int, bits="unsigned int")
cdef float from_fp8(int code) noexcept nogil

# ---------------------------------------------------------------- of arrays

cpdef void add_to_residual(ReadFloats values, WriteFloats residual) noexcept
cpdef void add_floats(ReadFloats values, WriteFloats out, float divisor) noexcept
cpdef void divide(WriteFloats out, float divisor) noexcept
@cython.locals(largest="unsigned int")
cpdef Py_ssize_t first_not_finite(ReadFloats values) noexcept
@cython.locals(
    a=double, b=double, c=double, d=double, e=double, f=double, g=double, h=double, rest=double
)
cpdef double sum_of_squares(ReadFloats values) noexcept
@cython.locals(moved=float)
cpdef void write_pseudo_gradient(ReadFloats base, WriteFloats out, float tokens) noexcept
@cython.locals(d=float, m=float, product=float, step=float)
cpdef void take_outer_step(
    WriteFloats parameters, WriteFloats momentum, WriteFloats mean, float lr, float mu
) noexcept
@cython.locals(step=float)
cpdef void take_plain_outer_step(WriteFloats parameters, WriteFloats mean, float lr) noexcept
cpdef void round_to_halves(ReadFloats values, WriteHalves halves) noexcept
@cython.locals(half="unsigned int", lost=float)
cpdef void round_with_residual_to_halves(
    ReadFloats values, WriteFloats residual, WriteHalves halves
) noexcept
cpdef void write_halves(ReadHalves halves, WriteFloats out) noexcept
cpdef void add_halves(ReadHalves halves, WriteFloats out, float divisor) noexcept
cpdef void write_sum_of_halves(
    ReadHalves halves, ReadHalves other, WriteFloats out, float divisor
) noexcept
@cython.locals(
    level_max=float, peak="unsigned int", encoded="unsigned int", scale=float, inverse=float,
    value=float, level=float, product=float, code=int, lower=int, upper=int,
)
cpdef Py_ssize_t encode_blocks(
    int kind, ReadFloats values, WriteFloats residual, WriteOctets scales, WriteOctets codes, WriteOctets levels
) noexcept
@cython.locals(scale=float, code=int)
cpdef void write_blocks(int kind, ReadOctets scales, ReadOctets codes, WriteFloats out) noexcept
@cython.locals(scale=float, part=float, code=int)
cpdef void add_blocks(
    int kind, ReadOctets scales, ReadOctets codes, WriteFloats out, float divisor
) noexcept
@cython.locals(
    scale=float, other_scale=float, part=float, other=float, code=int, other_code=int
)
cpdef void write_sum_of_blocks(
    int kind,
    ReadOctets scales,
    ReadOctets codes,
    ReadOctets other_scales,
    ReadOctets other_codes,
    WriteFloats out,
    float divisor,
) noexcept
