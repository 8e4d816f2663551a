/* A team of threads that a job's caller is helped by, and never has to wait for.
 *
 * A stage is over when its items are done, not when every thread has come by: threads claim chunks
 * of items from a counter, and one that sleeps, or has lost its core to another process, holds up
 * the chunk that it is at and nothing else. The thread that finishes a stage's last item sets up
 * the next one, and runs stages of one chunk by itself.
 *
 * A helper that keeps losing its core with a chunk in its hands costs more than it is worth: all
 * others wait for that chunk. One that has waited for its core for more than half of the time that
 * it has computed stays away, longer each time, a second at most. So beside other processes a team
 * becomes as large as there are cores for it, and grows again when they have gone.
 *
 * Rules:
 * - A result does not depend on the number of threads: an item is computed by one of them, alone.
 * - A thread that has nothing to do looks for work for SPIN_NS, which is longer than a chunk takes;
 *   then it sleeps until a stage begins. So an idle team costs nothing, and one whose threads
 *   cannot all run gives its cores to those that can.
 * - One job at a time; another caller that comes meanwhile does its own alone.
 * - Threads are made when they are first wanted, and stay.
 */

#define _GNU_SOURCE
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 50000
#define SUSPECT_NS 300000     /* a chunk that took so long: has its thread lost its core? */
#define WINDOW_NS 50000000    /* of computing, over which is judged whether it loses too much */
#define LEAST_AWAY_NS 20000000
#define MOST_AWAY_NS 1000000000
#define MOST 1024 /* threads */
#define CLAIMED 0xffffffffULL /* a ticket's lower half: all items, of however many */

/* Cache lines of their own: what changes with every claim, with every stage, and rarely. */
static struct {
    /* epoch << 32 | first unclaimed item; an epoch is a stage of a job, and never comes again */
    uint64_t ticket __attribute__((aligned(64)));
    uint32_t sleepers;
    int64_t done __attribute__((aligned(64))); /* items of this stage */
    /* of the stage; read before a claim succeeds, so by itself, and never through `job` */
    int64_t items __attribute__((aligned(64)));
    int64_t chunk;
    Stage stage; /* these three are read and written by threads that hold a claim */
    int64_t index;
    const Job *job;
    uint32_t over; /* the epoch in which the last job is over: once the ticket is of that epoch */
    uint32_t active __attribute__((aligned(64))); /* threads that may claim, the caller with them */
    uint32_t made;                                /* … that there are */
    uint32_t away;
    pthread_mutex_t busy;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .active = 1, .made = 1};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void sleep_while(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MOST, NULL, NULL, 0);
}

static uint32_t *epoch_word(void) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return (uint32_t *)&team.ticket + 1;
#else
    return (uint32_t *)&team.ticket;
#endif
}

static int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

/* How a helper fares. Since `wall` it has had its core for what its processor clock has gone on
 * from `cpu`, and has slept, by itself, for `slept`. */
typedef struct {
    int64_t wall, cpu, slept;
    int64_t computed, lost; /* so far, of WINDOW_NS: with its core, without it and at a chunk */
    int64_t away;           /* how long it stays away next */
} Fares;

static void stay_away(Fares *f) {
    struct timespec away = {f->away / 1000000000, f->away % 1000000000};
    __atomic_fetch_add(&team.away, 1, __ATOMIC_RELAXED);
    nanosleep(&away, NULL);
    __atomic_fetch_sub(&team.away, 1, __ATOMIC_RELAXED);
    f->away = 2 * f->away < MOST_AWAY_NS ? 2 * f->away : MOST_AWAY_NS;
    f->computed = f->lost = f->slept = 0;
    f->wall = now_ns(), f->cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* A chunk took long. */
static void judge(Fares *f, int64_t took) {
    int64_t wall = now_ns(), cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int64_t computed = cpu - f->cpu, lost = wall - f->wall - computed - f->slept;
    f->wall = wall, f->cpu = cpu, f->slept = 0;
    f->computed += computed;
    f->lost += lost < took ? lost : took;
    if (f->lost > f->computed / 2) {
        stay_away(f);
    } else if (f->computed > WINDOW_NS) {
        f->lost = (int64_t)((double)f->lost * WINDOW_NS / (double)f->computed);
        f->computed = WINDOW_NS;
        f->away = LEAST_AWAY_NS;
    }
}

/* Until another stage has begun. */
static void wait_beyond(uint32_t epoch, Fares *fares) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(&team.ticket, __ATOMIC_ACQUIRE) >> 32 != epoch) return;
            relax();
        }
    } while (now_ns() < end);
    int64_t from = now_ns();
    __atomic_fetch_add(&team.sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team.ticket, __ATOMIC_SEQ_CST) >> 32 == epoch)
        sleep_while(epoch_word(), epoch);
    __atomic_fetch_sub(&team.sleepers, 1, __ATOMIC_SEQ_CST);
    if (fares) fares->slept += now_ns() - from;
}

/* Begin the stage at `index` or, where one thread is enough for that, do it and go on. To be called
 * when every item of the stage before is done: there is nobody else then who looks at the job. */
static void begin(int64_t index) {
    const Job *job = team.job;
    Stage stage;
    for (;; index = stage.after) {
        stage = job->stage(job->of, index);
        if (stage.items < 0 || stage.items > stage.chunk) break;
        if (stage.items) job->work(job->of, index, 0, stage.items);
    }
    /* first nothing is left to claim: a thread that has read the old ticket and reads the new
     * numbers, which are stored behind this, claims in vain */
    uint64_t old = __atomic_load_n(&team.ticket, __ATOMIC_RELAXED) | CLAIMED;
    __atomic_store_n(&team.ticket, old, __ATOMIC_RELEASE);
    team.stage = stage, team.index = index;
    __atomic_store_n(&team.done, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&team.chunk, stage.chunk, __ATOMIC_RELEASE);
    __atomic_store_n(&team.items, stage.items < 0 ? 0 : stage.items, __ATOMIC_RELEASE);
    if (stage.items < 0) __atomic_store_n(&team.over, (uint32_t)((old + 1) >> 32), __ATOMIC_RELEASE);
    /* The next epoch, from item 0. Where the job is over its caller goes on from here, perhaps with
     * another job, so nothing of the team may be written behind this. */
    __atomic_store_n(&team.ticket, old + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST)) wake(epoch_word());
}

/* Do one chunk of the stage that `ticket` is of, if any is left; else wait for another stage.
 * `ticket` is the team's, a moment ago. `fares` is a helper's; a job's caller has none. */
static void help(uint64_t ticket, Fares *fares) {
    int64_t first = (int64_t)(ticket & CLAIMED);
    int64_t items = __atomic_load_n(&team.items, __ATOMIC_ACQUIRE);
    int64_t chunk = __atomic_load_n(&team.chunk, __ATOMIC_ACQUIRE);
    if (first >= items) {
        wait_beyond((uint32_t)(ticket >> 32), fares);
        return;
    }
    /* where the stage is another by now, so is the ticket, and what was read is not used */
    if (!__atomic_compare_exchange_n(&team.ticket, &ticket, ticket + (uint64_t)chunk, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    int64_t last = first + chunk < items ? first + chunk : items, from = fares ? now_ns() : 0;
    team.job->work(team.job->of, team.index, first, last);
    int64_t took = fares ? now_ns() - from : 0;
    if (__atomic_add_fetch(&team.done, last - first, __ATOMIC_ACQ_REL) == items)
        begin(team.stage.after);
    if (took > SUSPECT_NS) judge(fares, took);
}

static void *member(void *number) {
    uint32_t own = (uint32_t)(uintptr_t)number;
    Fares fares = {.wall = now_ns(), .away = LEAST_AWAY_NS};
    fares.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (;;) {
        uint32_t active = __atomic_load_n(&team.active, __ATOMIC_ACQUIRE);
        if (own < active)
            help(__atomic_load_n(&team.ticket, __ATOMIC_ACQUIRE), &fares);
        else {
            int64_t from = now_ns();
            sleep_while(&team.active, active);
            fares.slept += now_ns() - from;
        }
    }
    return NULL;
}

static void grow(uint32_t wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads that know of them */
    while (team.made < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, member, (void *)(uintptr_t)team.made)) break;
        pthread_setname_np(thread, "slipstream-cpu");
        pthread_detach(thread);
        team.made++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static _Thread_local uint32_t wanted = 1;

/* How many threads the jobs of the calling thread may have, itself one of them. */
void slipstream_set_threads(int64_t count) {
    wanted = count < 1 ? 1 : count > MOST ? MOST : (uint32_t)count;
}

/* … and how many of them do not stay away. */
int64_t slipstream_present(void) {
    uint32_t away = __atomic_load_n(&team.away, __ATOMIC_RELAXED);
    return away < wanted ? wanted - away : 1;
}

void slipstream_do_alone(const Job *job) {
    Stage stage;
    for (int64_t index = 0; (stage = job->stage(job->of, index)).items >= 0; index = stage.after)
        if (stage.items) job->work(job->of, index, 0, stage.items);
}

/* Whether all of it is one chunk, for which nobody needs to be woken. */
static bool is_small(const Job *job) {
    Stage stage = job->stage(job->of, 0);
    return stage.items <= stage.chunk && job->stage(job->of, stage.after).items < 0;
}

void slipstream_do(const Job *job) {
    if (wanted == 1 || is_small(job) || pthread_mutex_trylock(&team.busy)) {
        slipstream_do_alone(job);
        return;
    }
    if (team.made < wanted) grow(wanted);
    if (team.active != wanted) {
        __atomic_store_n(&team.active, wanted, __ATOMIC_RELEASE);
        wake(&team.active);
    }
    team.job = job;
    begin(0);
    /* the ticket that is looked at is the one that is waited for to change: the last stage may be
     * set up in between, and no other comes behind it */
    for (;;) {
        uint64_t ticket = __atomic_load_n(&team.ticket, __ATOMIC_ACQUIRE);
        if (ticket >> 32 == __atomic_load_n(&team.over, __ATOMIC_ACQUIRE)) break;
        help(ticket, NULL);
    }
    pthread_mutex_unlock(&team.busy);
}
