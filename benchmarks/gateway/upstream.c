/* The upstream of the gateway benchmark: answers every POST with what `canned.py` has written to a file.
 *
 *     upstream FILE      listens on 127.0.0.1, prints its port, ends when its standard input does
 *
 * One thread, one epoll. A call whose body asks for a stream (`"stream":true` in its first or last 4 KiB) gets the
 * events, each by a write of its own, so that a reader may find one or many; a call for a model named `…paced-MS"`
 * gets each MS milliseconds after the one before. Every other call gets the whole answer.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RECORDS = 1024, MAX_FDS = 65536, SCAN = 4096 };
static const char STAMP[] = "0000000000";

struct record { char *bytes; size_t length; };
static struct record records[MAX_RECORDS];
static int record_count;

struct connection {
    char *in; size_t in_used, in_room;     /* what has come of a request */
    char *out; size_t out_used, out_sent, out_room;
    uint64_t number;                       /* of the answer being sent */
    int event;                             /* the record to send next; 0: none */
    uint64_t interval, due;                /* of a paced stream, ns; 0: not paced */
};
static struct connection *connections[MAX_FDS];
static int highest, poller, timer, paced;
static uint64_t answers;

static void die(const char *what) { perror(what); exit(1); }

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void *grown(void *old, size_t size) {
    void *new = realloc(old, size);
    if (!new) die("realloc");
    return new;
}

static void read_records(const char *path) {
    FILE *file = fopen(path, "rb");
    uint32_t length;
    if (!file) die(path);
    while (fread(&length, 4, 1, file) == 1 && record_count < MAX_RECORDS) {
        struct record *record = &records[record_count++];
        record->length = length;
        record->bytes = grown(NULL, length + 1);
        if (fread(record->bytes, 1, length, file) != length) die(path);
        record->bytes[length] = 0;
    }
    fclose(file);
    if (record_count < 3) { fprintf(stderr, "%s has too few records\n", path); exit(1); }
}

static void drop(int fd) {
    struct connection *c = connections[fd];
    if (c->interval) paced--;
    free(c->in); free(c->out); free(c);
    connections[fd] = NULL;
    close(fd);
}

static void put(struct connection *c, const struct record *record) {
    if (c->out_used + record->length > c->out_room)
        c->out = grown(c->out, c->out_room = 2 * (c->out_used + record->length));
    char *place = c->out + c->out_used;
    memcpy(place, record->bytes, record->length);
    c->out_used += record->length;
    char digits[sizeof STAMP + 12];
    snprintf(digits, sizeof digits, "%010llu", (unsigned long long)c->number % 10000000000u);
    for (char *end = place + record->length; (place = memmem(place, end - place, STAMP, 10)); place += 10)
        memcpy(place, digits, 10);
}

/* 1: all is sent; 0: the reader is slow, EPOLLOUT will tell; -1: it has gone */
static int flush(int fd) {
    struct connection *c = connections[fd];
    while (c->out_sent < c->out_used) {
        ssize_t sent = send(fd, c->out + c->out_sent, c->out_used - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN ? 0 : -1;
        c->out_sent += sent;
    }
    c->out_used = c->out_sent = 0;
    return 1;
}

/* Sends what there is to send now; the same results. */
static int proceed(int fd) {
    struct connection *c = connections[fd];
    int flushed = flush(fd);
    while (flushed == 1 && c->event && !c->interval) {
        put(c, &records[c->event]);
        c->event = c->event + 1 < record_count ? c->event + 1 : 0;
        flushed = flush(fd);
    }
    return flushed;
}

static int holds(const char *body, size_t length, const char *what) {
    return memmem(body, length, what, strlen(what)) != NULL;
}

static int answer(int fd, const char *body, size_t length) {
    struct connection *c = connections[fd];
    size_t first = length < SCAN ? length : SCAN, last = length - first < SCAN ? length - first : SCAN;
    const char *tail = body + length - last, *pace = memmem(body, first, "paced-", 6);
    if (!pace && last) pace = memmem(tail, last, "paced-", 6);
    int stream = holds(body, first, "\"stream\":true") || holds(body, first, "\"stream\": true") ||
                 (last && (holds(tail, last, "\"stream\":true") || holds(tail, last, "\"stream\": true")));
    c->number = ++answers;
    if (!stream) {
        put(c, &records[0]);
        return flush(fd);
    }
    c->event = 2;
    put(c, &records[1]);
    if (pace) {
        c->interval = strtoull(pace + 6, NULL, 10) * 1000000u;
        c->due = now() + c->interval;
        paced++;
    }
    return proceed(fd);
}

/* The whole requests that have come, one after the other; -1: no good. */
static int take(int fd) {
    struct connection *c = connections[fd];
    size_t at = 0;
    while (!c->event && c->in_used > at) {
        char *head = c->in + at, *end = memmem(head, c->in_used - at, "\r\n\r\n", 4);
        size_t length = 0;
        if (!end) break;
        for (char *line = head; line < end; line = (char *)memmem(line, end + 2 - line, "\r\n", 2) + 2)
            if (!strncasecmp(line, "content-length:", 15)) length = strtoull(line + 15, NULL, 10);
            else if (!strncasecmp(line, "transfer-encoding:", 18)) return -1;
        char *body = end + 4;
        if ((size_t)(c->in + c->in_used - body) < length) break;
        at = body + length - c->in;
        if (answer(fd, body, length) < 0) return -1;
    }
    memmove(c->in, c->in + at, c->in_used - at);
    c->in_used -= at;
    return 0;
}

static int readable(int fd) {
    struct connection *c = connections[fd];
    for (;;) {
        if (c->in_room - c->in_used < 65536) c->in = grown(c->in, c->in_room = 2 * c->in_room + 65536);
        size_t room = c->in_room - c->in_used;
        ssize_t got = recv(fd, c->in + c->in_used, room, 0);
        if (got == 0) return -1;
        if (got < 0) return errno == EAGAIN ? 0 : -1;
        c->in_used += got;
        if (take(fd) < 0) return -1;
        if ((size_t)got < room) return 0;
    }
}

static void set_timer(uint64_t due) {
    struct itimerspec at = {.it_value = {due / 1000000000u, due % 1000000000u}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void tick(void) {
    uint64_t next = 0, at = now();
    for (int fd = 0; paced && fd <= highest; fd++) {
        struct connection *c = connections[fd];
        if (!c || !c->interval) continue;
        if (c->due <= at) {
            put(c, &records[c->event]);
            c->event = c->event + 1 < record_count ? c->event + 1 : 0;
            if (c->event) c->due += c->interval;
            else { c->interval = 0; paced--; }
            if (flush(fd) < 0) { drop(fd); continue; }
            if (!c->event && take(fd) < 0) { drop(fd); continue; }
            if (!c->interval) continue;
        }
        if (!next || c->due < next) next = c->due;
    }
    if (next) set_timer(next);
}

int main(int argc, char **argv) {
    if (argc != 2) { fprintf(stderr, "usage: upstream FILE\n"); return 2; }
    read_records(argv[1]);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (listener < 0 || bind(listener, (void *)&address, size) || listen(listener, 4096)) die("listen");
    getsockname(listener, (void *)&address, &size);
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    int watched[] = {listener, timer, 0};
    for (int i = 0; i < 3; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = watched[i]};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, watched[i], &event)) die("epoll_ctl");
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        struct epoll_event events[512];
        int before = paced, count = epoll_wait(poller, events, 512, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == 0) {
                char bytes[64];
                if (read(0, bytes, sizeof bytes) <= 0) return 0;
            } else if (fd == listener) {
                int came = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                if (came < 0) continue;
                if (came >= MAX_FDS) { close(came); continue; }
                setsockopt(came, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                connections[came] = calloc(1, sizeof(struct connection));
                if (!connections[came]) die("calloc");
                if (came > highest) highest = came;
                struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.fd = came};
                if (epoll_ctl(poller, EPOLL_CTL_ADD, came, &event)) die("epoll_ctl");
            } else if (fd == timer) {
                uint64_t times;
                if (read(timer, &times, sizeof times) > 0) tick();
            } else if (connections[fd]) {
                int state = events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP) ? readable(fd) : 0;
                if (state == 0 && events[i].events & EPOLLOUT) {
                    state = proceed(fd);
                    if (state == 1 && !connections[fd]->event) state = take(fd);
                }
                if (state < 0) drop(fd);
            }
        }
        if (paced > before) tick(); /* a stream has begun: the timer may have to be earlier */
    }
}
