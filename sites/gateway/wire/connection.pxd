# Types of connection.py, which Cython compiles with them; as plain Python it needs none.

cimport cython

cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/ioctl.h>
    #include <sys/socket.h>
    #include <sys/uio.h>
    #include <linux/sockios.h>

    #define WIRE_PIECES 16

    static inline void copy(size_t to, size_t from, Py_ssize_t length) {
        memcpy((void *)to, (const void *)from, (size_t)length);
    }
    static inline void move(size_t to, size_t from, Py_ssize_t length) {
        memmove((void *)to, (const void *)from, (size_t)length);
    }
    static inline uint32_t load8(size_t at) { return *(const unsigned char *)at; }
    static inline uint32_t load32(size_t at) {
        const unsigned char *b = (const unsigned char *)at;
        return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    }
    /* The head of a frame of DATA, and a message's prefix if there is room for one. */
    static inline void store_head(size_t at, Py_ssize_t length, unsigned stream, int prefix,
                                  Py_ssize_t message) {
        unsigned char *b = (unsigned char *)at;
        b[0] = length >> 16, b[1] = length >> 8, b[2] = length;
        b[3] = b[4] = 0;
        b[5] = stream >> 24, b[6] = stream >> 16, b[7] = stream >> 8, b[8] = stream;
        if (!prefix) return;
        b[9] = 0;
        b[10] = message >> 24, b[11] = message >> 16, b[12] = message >> 8, b[13] = message;
    }
    static inline Py_ssize_t receive(int fd, size_t at, Py_ssize_t length, size_t at2,
                                     Py_ssize_t length2) {
        struct iovec parts[2] = {{(void *)at, (size_t)length}, {(void *)at2, (size_t)length2}};
        Py_ssize_t got;
        do got = readv(fd, parts, length2 ? 2 : 1); while (got < 0 && errno == EINTR);
        return got < 0 ? -errno : got;
    }
    static inline Py_ssize_t transmit(int fd, const size_t *starts, const Py_ssize_t *lengths,
                                      int first, int count, Py_ssize_t room) {
        struct iovec parts[WIRE_PIECES];
        struct msghdr message = {0};
        int n = 0;
        for (; n < count && n < WIRE_PIECES && room > 0; n++) {
            Py_ssize_t length = lengths[first + n] < room ? lengths[first + n] : room;
            parts[n].iov_base = (void *)starts[first + n];
            parts[n].iov_len = (size_t)length;
            room -= length;
        }
        message.msg_iov = parts;
        message.msg_iovlen = n;
        Py_ssize_t sent;
        do sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        while (sent < 0 && errno == EINTR);
        return sent < 0 ? -errno : sent;
    }
    static inline int is_block(Py_ssize_t result) {
        return result == -EAGAIN || result == -EWOULDBLOCK;
    }
    /* OpenSSL, as Python has loaded it. */
    typedef int (*tls_io)(size_t session, void *at, int length);
    static tls_io tls_read, tls_write;
    static int (*tls_why)(size_t session, int result);
    static void (*tls_forget)(void);
    static unsigned long (*tls_last)(void);
    static unsigned long tls_failed;

    static void use_tls(size_t reads, size_t writes, size_t why, size_t forgets,
                        size_t last) {
        tls_read = (tls_io)reads;
        tls_write = (tls_io)writes;
        tls_why = (int (*)(size_t, int))why;
        tls_forget = (void (*)(void))forgets;
        tls_last = (unsigned long (*)(void))last;
    }
    static Py_ssize_t cipher(tls_io io, size_t session, size_t at, Py_ssize_t length) {
        tls_forget();
        errno = 0;
        int result = io(session, (void *)at, (int)(length < (1 << 30) ? length : 1 << 30));
        if (result > 0) return result;
        int failure = errno;
        switch (tls_why(session, result)) {
            case 2: case 3: return -EAGAIN; /* SSL_ERROR_WANT_READ, _WRITE */
            case 5: return failure ? -failure : 0; /* SSL_ERROR_SYSCALL */
            case 6: return 0; /* SSL_ERROR_ZERO_RETURN */
            default: tls_failed = tls_last(); return -EPROTO;
        }
    }
    static Py_ssize_t decipher(size_t session, size_t at, Py_ssize_t length) {
        return cipher(tls_read, session, at, length);
    }
    static Py_ssize_t encipher(size_t session, size_t at, Py_ssize_t length) {
        return cipher(tls_write, session, at, length);
    }
    static unsigned long tls_failure(void) { return tls_failed; }
    static Py_ssize_t unacknowledged(int fd) {
        int left = 0;
        return ioctl(fd, SIOCOUTQ, &left) < 0 ? 0 : left; /* sending tells the error */
    }
    static void set_mark(int fd, int mark) {
        setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark);
    }
    static size_t address_of(PyObject *owner) {
        Py_buffer view;
        if (PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE) < 0) return 0;
        size_t at = (size_t)view.buf;
        PyBuffer_Release(&view);
        return at;
    }
    """
    void copy(size_t to, size_t source, Py_ssize_t length) noexcept nogil
    void move(size_t to, size_t source, Py_ssize_t length) noexcept nogil
    unsigned int load8(size_t at) noexcept nogil
    unsigned int load32(size_t at) noexcept nogil
    void store_head(size_t at, Py_ssize_t length, unsigned int stream, int prefix, Py_ssize_t message) noexcept nogil
    Py_ssize_t receive(int fd, size_t at, Py_ssize_t length, size_t at2, Py_ssize_t length2) noexcept nogil
    Py_ssize_t transmit(int fd, size_t *starts, Py_ssize_t *lengths, int first, int count, Py_ssize_t room) noexcept nogil
    void use_tls(size_t reads, size_t writes, size_t why, size_t forgets, size_t last) noexcept
    unsigned long tls_failure() noexcept
    void set_mark(int fd, int mark) noexcept nogil
    Py_ssize_t unacknowledged(int fd) noexcept nogil
    Py_ssize_t decipher(size_t session, size_t at, Py_ssize_t length) noexcept nogil
    Py_ssize_t encipher(size_t session, size_t at, Py_ssize_t length) noexcept nogil
    bint is_block(Py_ssize_t result) noexcept nogil
    size_t address_of(object owner) except 0


cdef class Incoming:
    cdef Py_ssize_t _length, _filled
    cdef size_t _memory_at, _prefix_at
    cdef int _prefix_bytes
    cdef object _memory, _prefix

    cdef Py_ssize_t _missing(self) noexcept nogil
    cdef size_t _end(self) noexcept nogil
    cdef void _note(self, Py_ssize_t num_bytes) noexcept nogil

    @cython.locals(taken=Py_ssize_t)
    cdef Py_ssize_t _fill(self, size_t source, Py_ssize_t num_bytes) noexcept nogil


cdef class Reader:
    cdef public Py_ssize_t begin, end, data_left, pad_left
    cdef public long long renewed_in, read_bytes
    cdef public unsigned int stream
    cdef public bint takes_data, is_last, is_dry, is_short, ends
    cdef Py_ssize_t _failed
    cdef public int reads_left
    cdef public size_t session
    cdef readonly object scratch
    cdef readonly Incoming message
    cdef Py_ssize_t _scratch_bytes
    cdef size_t _scratch_at
    cdef bint _is_direct

    @cython.locals(taken=Py_ssize_t, available=Py_ssize_t, length=Py_ssize_t, kind="unsigned int", at=size_t)
    cdef int _step(self) noexcept nogil

    @cython.locals(code=Py_ssize_t, got=Py_ssize_t, wanted=Py_ssize_t, spare=Py_ssize_t)
    cdef Py_ssize_t _pump(self, int fd) noexcept nogil

    cdef Py_ssize_t _make_room(self) noexcept nogil
    cdef Py_ssize_t _wanted(self) noexcept nogil

    cpdef int step(self)

    @cython.locals(code=Py_ssize_t)
    cpdef int pump(self, int descriptor) except -1


cdef class Writer:
    cdef readonly long long left_bytes
    cdef public size_t session
    cdef public unsigned int stream
    cdef public Py_ssize_t frame_bytes, connection_window, stream_window
    cdef object _waiting
    cdef object _loaded
    cdef object _own, _message
    cdef int _first, _count, _prefix_left
    cdef size_t _message_at
    cdef Py_ssize_t _message_left
    cdef size_t _own_at
    cdef Py_ssize_t _pending
    cdef size_t _starts[64]
    cdef Py_ssize_t _lengths[64]

    @cython.locals(sent=Py_ssize_t, total=Py_ssize_t, most=int)
    cdef Py_ssize_t _flush(self, int fd, Py_ssize_t room) noexcept nogil

    @cython.locals(length=Py_ssize_t, taken=Py_ssize_t, index=int)
    cdef Py_ssize_t _encipher(self, Py_ssize_t room) noexcept nogil

    cdef void _skip(self, Py_ssize_t num_bytes) noexcept nogil
    cpdef post(self, message)

    @cython.locals(taken=Py_ssize_t)
    cdef _load(self)

    @cython.locals(at=size_t)
    cdef _add_frame(self, Py_ssize_t taken)

    cdef _add(self, object owner, size_t at, Py_ssize_t length)
    cdef Py_ssize_t _sendable(self) noexcept nogil
    cdef void _drop(self)


cdef class Engine


cdef class Line:
    cdef readonly int descriptor
    cdef readonly Reader reader
    cdef readonly Writer writer
    cdef readonly object on_turn
    cdef public bint wants_read, is_by_hand, is_stuck, is_full
    cdef readonly bint has_read, has_written
    cdef public int reads_max
    cdef public Py_ssize_t window_bytes
    cdef public double look_s
    cdef Py_ssize_t _failed, _mark
    cdef Engine _engine
    cdef int _slot

    @cython.locals(wanted=Py_ssize_t, most=Py_ssize_t)
    cdef void _set_mark(self) noexcept nogil

    @cython.locals(engine=Engine)
    cpdef detach(self)

    cpdef tend(self)

    cpdef note(self, unsigned int events)

    cdef bint _turn(self) noexcept nogil

    cdef bint _is_due(self) noexcept nogil

    cdef bint _awaits_room(self) noexcept nogil

    @cython.locals(room=Py_ssize_t)
    cdef Py_ssize_t _room(self) noexcept nogil

    @cython.locals(room=Py_ssize_t, sent=Py_ssize_t)
    cdef void _write(self) noexcept nogil


cdef class Engine:
    cdef object _loop, _poll, _due, _looking
    cdef dict _lines
    cdef list _slots
    cdef int _count
    cdef void* _table[8192]
    cdef int _found[8192]

    @cython.locals(last=Line)
    cpdef attach(self, Line line)

    @cython.locals(last=Line)
    cpdef detach(self, Line line)

    cdef void _place(self, Line line)

    cpdef tend(self, Line line)

    @cython.locals(num_found=int, index=int, slot=int, line=Line)
    cpdef turn(self)

    cpdef _look(self)

    @cython.locals(num_found=int, slot=int)
    cdef int _turn(self) noexcept nogil

    @cython.locals(slot=int)
    cdef bint _is_due(self) noexcept nogil

    @cython.locals(slot=int)
    cdef int _first_that_awaits_room(self) noexcept nogil
