/* Exchanges over the ranks of a core, through memory that they share.
 *
 * Each rank has two slots, which exchanges use in turns. A rank writes its part into its slot, counts
 * the exchange in its counter, waits until every rank has counted it, and reads the others' slots. A
 * slot is written again two exchanges later: by then every rank has counted the one between, so it
 * has read this one. Sums are made in the order of the ranks, so all ranks get the same bits.
 */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE 64      /* bytes; no two ranks write to the same */
#define SPINS 2000   /* some tens of microseconds */
#define YIELDS 2000  /* before sleeping between two looks */
#define SLEEP_NS 50000

typedef struct {
    char *memory; /* a line for each rank's counter, then its two slots for each rank */
    int64_t rank;
    int64_t size;
    int64_t slot_bytes; /* a multiple of LINE */
    int64_t count;      /* exchanges so far */
    int64_t timeout_s;
} Exchange;

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static _Atomic int64_t *counter(const Exchange *e, int64_t rank) {
    return (_Atomic int64_t *)(e->memory + LINE * rank);
}

static float *slot(const Exchange *e, int64_t rank) {
    int64_t turn = e->count & 1;
    return (float *)(e->memory + LINE * e->size + (2 * rank + turn) * e->slot_bytes);
}

static int64_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Count this exchange, and wait for the others; 0, or -1 where one does not come in time. */
static int meet(const Exchange *e) {
    int64_t wanted = e->count + 1, end = 0;
    atomic_store_explicit(counter(e, e->rank), wanted, memory_order_release);
    for (int64_t rank = 0; rank < e->size; rank++) {
        for (int64_t looks = 0;
             atomic_load_explicit(counter(e, rank), memory_order_acquire) < wanted; looks++) {
            if (looks < SPINS) {
                pause_briefly();
                continue;
            }
            if (looks < SPINS + YIELDS) {
                /* the rank that is waited for may need this core (decision 035) */
                sched_yield();
                continue;
            }
            if (end == 0)
                end = now_s() + e->timeout_s;
            else if (now_s() > end)
                return -1;
            nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
        }
    }
    return 0;
}

/* y[n] = the sum of all ranks' x[n] */
int slipstream_ranks_sum(Exchange *e, const float *x, float *y, int64_t n) {
    int64_t most = e->slot_bytes / (int64_t)sizeof(float);
    for (int64_t first = 0; first < n; first += most) {
        int64_t num = n - first < most ? n - first : most;
        memcpy(slot(e, e->rank), x + first, num * sizeof(float));
        if (meet(e))
            return -1;
        float *restrict out = y + first;
        memcpy(out, slot(e, 0), num * sizeof(float));
        for (int64_t rank = 1; rank < e->size; rank++) {
            const float *restrict part = slot(e, rank);
            for (int64_t i = 0; i < num; i++)
                out[i] += part[i];
        }
        e->count++;
    }
    return 0;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* y[rows, width] from x[rows, own]: rank r has the columns from r * share on, at most that many. A
 * row of a share fits into a slot. */
int slipstream_ranks_gather(
    Exchange *e, const float *x, float *y, int64_t rows, int64_t share, int64_t width) {
    int64_t most = e->slot_bytes / (share * (int64_t)sizeof(float));
    int64_t begin = least(e->rank * share, width), own = least(begin + share, width) - begin;
    for (int64_t first = 0; first < rows; first += most) {
        int64_t num = least(rows - first, most);
        memcpy(slot(e, e->rank), x + first * own, num * own * sizeof(float));
        if (meet(e))
            return -1;
        for (int64_t rank = 0; rank < e->size; rank++) {
            int64_t at = least(rank * share, width), its = least(at + share, width) - at;
            const float *part = slot(e, rank);
            for (int64_t row = 0; row < num; row++)
                memcpy(y + (first + row) * width + at, part + row * its, its * sizeof(float));
        }
        e->count++;
    }
    return 0;
}

/* ids[n] of the first rank; they fit into a slot */
int slipstream_ranks_take(Exchange *e, int64_t *ids, int64_t n) {
    if (e->rank == 0)
        memcpy(slot(e, 0), ids, n * sizeof(int64_t));
    if (meet(e))
        return -1;
    if (e->rank != 0)
        memcpy(ids, slot(e, 0), n * sizeof(int64_t));
    e->count++;
    return 0;
}
