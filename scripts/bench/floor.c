/* What exchanging float32 between two sites costs a processor at least.

   floor SITE ADDRESS PORT BYTES CHUNK_BYTES ROUNDS NAP_US

   Site 0 listens at ADDRESS, site 1 connects to it. Each has BYTES of float32, and is the root of
   every other chunk. A round: each sends its part of the other's chunks, adds what comes to its
   own, halves the sum, and sends it back. Every chunk is hashed where it leaves and where it
   arrives. One thread sleeps for NAP_US, then does all that can be done without waiting.

   It prints a line for each round: seconds, and seconds of processor time. It is no product: no
   TLS, no HTTP/2, no third site, and any fault ends it. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 4, UNSENT_BYTES = 256 << 10, TRIES = 100, DEADLINE_S = 300 };

typedef struct {
    uint32_t chunk;
    uint32_t is_result;
    uint64_t hash;
} head_t;

typedef struct {
    int fd;
    head_t *queue; /* what is to be sent, in order */
    size_t first, last;
    size_t sent; /* bytes of the first, head included */
    head_t head; /* of what is coming */
    char *chunk;
    size_t received;
} connection_t;

static void give_up(const char *why) {
    perror(why);
    exit(1);
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Four lanes of 64 bits, so that it takes no longer than reading. */
static uint64_t hash(const void *data, size_t num_bytes) {
    const uint64_t *words = data;
    uint64_t lanes[4] = {1, 2, 3, 4};
    for (size_t at = 0; at + 4 <= num_bytes / 8; at += 4)
        for (int lane = 0; lane < 4; lane++)
            lanes[lane] = (lanes[lane] ^ words[at + lane]) * 0x9E3779B97F4A7C15u;
    return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
}

static void set(int fd, int level, int option, int value) {
    if (setsockopt(fd, level, option, &value, sizeof value)) give_up("setsockopt");
}

static void connect_all(connection_t *all, int site, struct sockaddr_in *at) {
    int listening = -1;
    if (site == 0) {
        listening = socket(AF_INET, SOCK_STREAM, 0);
        set(listening, SOL_SOCKET, SO_REUSEADDR, 1);
        if (bind(listening, (void *)at, sizeof *at) || listen(listening, CONNECTIONS + 1))
            give_up("listen");
    }
    for (int i = 0; i <= CONNECTIONS; i++) {
        int fd = -1;
        if (site == 0) fd = accept(listening, 0, 0);
        for (int tries = 0; site == 1; tries++) {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            if (!connect(fd, (void *)at, sizeof *at)) break;
            close(fd);
            if (tries == TRIES) give_up("connect");
            usleep(100000);
        }
        if (fd < 0) give_up("accept");
        set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES);
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "bbr", 3); /* where the kernel has it */
        if (i < CONNECTIONS) fcntl(fd, F_SETFL, O_NONBLOCK);
        all[i].fd = fd;
    }
}

/* The last connection carries no chunks: over it the sites begin each round together. */
static void wait_for_peer(int fd) {
    char byte = 0;
    if (write(fd, &byte, 1) != 1 || read(fd, &byte, 1) != 1) give_up("the other site");
}

static int would_block(ssize_t result) {
    if (result > 0) return 0;
    if (result < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    give_up("a connection");
    return 1;
}

/* Take what has come; return how many chunks are complete. */
static size_t take(connection_t *own, char *values, size_t chunk_bytes) {
    size_t complete = 0;
    for (;;) {
        ssize_t got;
        if (own->received < sizeof(head_t))
            got = recv(own->fd, (char *)&own->head + own->received,
                       sizeof(head_t) - own->received, 0);
        else
            got = recv(own->fd, own->chunk + own->received - sizeof(head_t),
                       chunk_bytes + sizeof(head_t) - own->received, 0);
        if (would_block(got)) return complete;
        own->received += (size_t)got;
        if (own->received < chunk_bytes + sizeof(head_t)) continue;
        own->received = 0;
        if (hash(own->chunk, chunk_bytes) != own->head.hash) give_up("a damaged chunk");
        char *place = values + own->head.chunk * chunk_bytes;
        if (own->head.is_result) {
            memcpy(place, own->chunk, chunk_bytes);
        } else {
            float *sum = (float *)place, *part = (float *)own->chunk;
            for (size_t at = 0; at < chunk_bytes / 4; at++) sum[at] = (sum[at] + part[at]) * .5f;
            own->queue[own->last++] = (head_t){own->head.chunk, 1, hash(place, chunk_bytes)};
        }
        complete++;
    }
}

/* Send what the socket takes; return how many chunks have left. */
static size_t send_on(connection_t *own, char *values, size_t chunk_bytes) {
    size_t left = 0;
    while (own->first < own->last) {
        head_t *head = &own->queue[own->first];
        char *chunk = values + head->chunk * chunk_bytes;
        ssize_t sent;
        if (!own->sent && !head->is_result) head->hash = hash(chunk, chunk_bytes);
        if (own->sent < sizeof(head_t))
            sent = send(own->fd, (char *)head + own->sent, sizeof(head_t) - own->sent, MSG_MORE);
        else
            sent = send(own->fd, chunk + own->sent - sizeof(head_t),
                        chunk_bytes + sizeof(head_t) - own->sent, 0);
        if (would_block(sent)) return left;
        own->sent += (size_t)sent;
        if (own->sent < chunk_bytes + sizeof(head_t)) continue;
        own->sent = 0;
        own->first++;
        left++;
    }
    return left;
}

int main(int count, char **words) {
    if (count != 8) return 2;
    int site = atoi(words[1]), nap_us = atoi(words[7]);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[3]))};
    if (inet_pton(AF_INET, words[2], &at.sin_addr) != 1) return 2;
    size_t num_bytes = (size_t)atol(words[4]), chunk_bytes = (size_t)atol(words[5]);
    size_t num_chunks = num_bytes / chunk_bytes;
    connection_t all[CONNECTIONS + 1] = {0};
    alarm(DEADLINE_S);
    connect_all(all, site, &at);
    char *values = malloc(num_bytes);
    for (int i = 0; i < CONNECTIONS; i++) {
        all[i].chunk = malloc(chunk_bytes);
        all[i].queue = malloc(2 * num_chunks * sizeof(head_t));
    }
    for (int round = 0; round < atoi(words[6]); round++) {
        for (size_t i = 0; i < num_bytes / 4; i++) ((float *)values)[i] = (float)(1 + 2 * site);
        for (int i = 0; i < CONNECTIONS; i++) all[i].first = all[i].last = 0;
        size_t to_come = num_chunks, to_send = num_chunks;
        for (uint32_t chunk = 0; chunk < num_chunks; chunk++)
            if ((int)(chunk & 1) != site) {
                connection_t *own = &all[chunk / 2 % CONNECTIONS];
                own->queue[own->last++] = (head_t){chunk, 0, 0};
            }
        wait_for_peer(all[CONNECTIONS].fd);
        double begin_s = seconds(CLOCK_MONOTONIC), cpu_s = seconds(CLOCK_PROCESS_CPUTIME_ID);
        while (to_come || to_send) {
            for (int i = 0; i < CONNECTIONS; i++) {
                to_come -= take(&all[i], values, chunk_bytes);
                to_send -= send_on(&all[i], values, chunk_bytes);
            }
            if (to_come || to_send) usleep((useconds_t)nap_us);
        }
        printf("%f %f\n", seconds(CLOCK_MONOTONIC) - begin_s,
               seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_s);
        fflush(stdout);
        for (size_t i = 0; i < num_bytes / 4; i++)
            if (((float *)values)[i] != 2.f) give_up("a wrong sum");
    }
    return 0;
}
