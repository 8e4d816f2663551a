/* A team of helper threads that compute a job together with its caller.
 *
 * A stage is over when its items are done, without a barrier: threads claim chunks of items from a
 * counter, and a thread that sleeps or is preempted delays only the chunk that it has claimed. The
 * thread that finishes the last item of a stage begins the next one, and runs stages of a single
 * chunk itself.
 *
 * A helper that is often preempted in the middle of a chunk slows the team down, as all other
 * threads wait for that chunk. A helper that was preempted for more than half of the time that it
 * has computed pauses, each time for longer, at most for a second. Beside other processes the team
 * therefore shrinks to the cores that are free, and grows again later.
 *
 * - A result does not depend on the number of threads: each item is computed by one thread.
 * - An idle thread spins for SPIN_NS, which is longer than a chunk takes, then sleeps until a stage
 *   begins. An idle team costs nothing, and threads that cannot all run leave the cores to those
 *   that can.
 * - The team runs one job at a time; a concurrent caller computes its job alone.
 * - Threads are created when they are first needed, and are kept.
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

#define SPIN_NS 50000         /* of looking for work, before a futex (decision 031) */
#define SUSPECT_NS 300000     /* a chunk that takes this long may have been preempted */
#define WINDOW_NS 50000000    /* of computing, over which a helper's losses are counted */
#define LEAST_AWAY_NS 20000000
#define MOST_AWAY_NS 1000000000
#define MOST 1024 /* threads */
#define CLAIMED 0xffffffffULL /* a ticket's lower half if no item is left */

/* Separate cache lines for what changes with each claim, with each stage, and rarely. */
static struct {
    /* epoch << 32 | first unclaimed item; each stage of each job has a new epoch */
    uint64_t ticket __attribute__((aligned(64)));
    uint32_t sleepers;
    int64_t done __attribute__((aligned(64))); /* items of this stage that are done */
    /* of the stage; copies, as they are read before a claim succeeds, when `job` may be invalid */
    int64_t items __attribute__((aligned(64)));
    int64_t chunk;
    Stage stage; /* these three are accessed only by threads that hold a claim */
    int64_t index;
    const Job *job;
    uint32_t over; /* the last job is over when the ticket has this epoch */
    uint32_t active __attribute__((aligned(64))); /* threads that may claim, the caller included */
    uint32_t made;                                /* threads that exist, the caller included */
    uint32_t away;                                /* helpers that pause */
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

/* Times of a helper, in ns. wall, cpu: the clocks at the last measurement; slept: voluntarily since
 * then. */
typedef struct {
    int64_t wall, cpu, slept;
    int64_t computed, lost; /* within WINDOW_NS: CPU time, and time preempted during a chunk */
    int64_t away;           /* length of the next pause */
} Times;

static void stay_away(Times *f) {
    struct timespec away = {f->away / 1000000000, f->away % 1000000000};
    __atomic_fetch_add(&team.away, 1, __ATOMIC_RELAXED);
    nanosleep(&away, NULL);
    __atomic_fetch_sub(&team.away, 1, __ATOMIC_RELAXED);
    f->away = 2 * f->away < MOST_AWAY_NS ? 2 * f->away : MOST_AWAY_NS;
    f->computed = f->lost = f->slept = 0;
    f->wall = now_ns(), f->cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* Account for a chunk that took long; the helper may pause. */
static void account(Times *f, int64_t took) {
    int64_t wall = now_ns(), cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int64_t computed = cpu - f->cpu, lost = wall - f->wall - computed - f->slept;
    f->wall = wall, f->cpu = cpu, f->slept = 0;
    f->computed += computed;
    f->lost += lost < took ? lost : took;
    if (f->lost > f->computed / 2) {
        /* a team waits for no helper that has lost its core (decision 031) */
        stay_away(f);
    } else if (f->computed > WINDOW_NS) {
        f->lost = (int64_t)((double)f->lost * WINDOW_NS / (double)f->computed);
        f->computed = WINDOW_NS;
        f->away = LEAST_AWAY_NS;
    }
}

/* Wait until a stage after `epoch` begins. */
static void wait_beyond(uint32_t epoch, Times *times) {
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
    if (times) times->slept += now_ns() - from;
}

/* Compute a stage of one chunk that waits for another process: that a helper was without a core in
 * it does not count as lost. */
static void wait_for_others(const Job *job, int64_t index, int64_t items, Times *times) {
    int64_t wall = now_ns(), cpu = times ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : 0;
    job->work(job->of, index, 0, items);
    if (times) times->slept += now_ns() - wall - (clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu);
}

/* Begin the stage at `index`; stages of a single chunk are run here. To be called when every item
 * of the previous stage is done: no other thread accesses the job then. times: as of `help`. */
static void begin(int64_t index, Times *times) {
    const Job *job = team.job;
    Stage stage;
    for (;; index = stage.after) {
        stage = job->stage(job->of, index);
        if (stage.items < 0 || stage.items > stage.chunk) break;
        if (stage.waits)
            wait_for_others(job, index, stage.items, times);
        else if (stage.items)
            job->work(job->of, index, 0, stage.items);
    }
    /* First mark all items as claimed: a thread that has read the old ticket and then reads the new
     * numbers, which are stored after this, fails to claim. */
    uint64_t old = __atomic_load_n(&team.ticket, __ATOMIC_RELAXED) | CLAIMED;
    __atomic_store_n(&team.ticket, old, __ATOMIC_RELEASE);
    team.stage = stage, team.index = index;
    __atomic_store_n(&team.done, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&team.chunk, stage.chunk, __ATOMIC_RELEASE);
    __atomic_store_n(&team.items, stage.items < 0 ? 0 : stage.items, __ATOMIC_RELEASE);
    if (stage.items < 0) __atomic_store_n(&team.over, (uint32_t)((old + 1) >> 32), __ATOMIC_RELEASE);
    /* The next epoch, from item 0. If the job is over, its caller continues from here, perhaps with
     * another job, so nothing of the team may be written after this. */
    __atomic_store_n(&team.ticket, old + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST)) wake(epoch_word());
}

/* Compute one chunk of the ticket's stage, if one is left; otherwise wait for another stage.
 * ticket: the team's, as read just before. times: a helper's; NULL for the job's caller. */
static void help(uint64_t ticket, Times *times) {
    int64_t first = (int64_t)(ticket & CLAIMED);
    int64_t items = __atomic_load_n(&team.items, __ATOMIC_ACQUIRE);
    int64_t chunk = __atomic_load_n(&team.chunk, __ATOMIC_ACQUIRE);
    if (first >= items) {
        wait_beyond((uint32_t)(ticket >> 32), times);
        return;
    }
    /* if the stage has changed, so has the ticket, and the values read above are not used */
    if (!__atomic_compare_exchange_n(&team.ticket, &ticket, ticket + (uint64_t)chunk, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    int64_t last = first + chunk < items ? first + chunk : items, from = times ? now_ns() : 0;
    team.job->work(team.job->of, team.index, first, last);
    int64_t took = times ? now_ns() - from : 0;
    if (__atomic_add_fetch(&team.done, last - first, __ATOMIC_ACQ_REL) == items)
        begin(team.stage.after, times);
    if (took > SUSPECT_NS) account(times, took);
}

static void *member(void *number) {
    uint32_t own = (uint32_t)(uintptr_t)number;
    Times times = {.wall = now_ns(), .away = LEAST_AWAY_NS};
    times.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (;;) {
        uint32_t active = __atomic_load_n(&team.active, __ATOMIC_ACQUIRE);
        if (own < active)
            help(__atomic_load_n(&team.ticket, __ATOMIC_ACQUIRE), &times);
        else {
            int64_t from = now_ns();
            sleep_while(&team.active, active);
            times.slept += now_ns() - from;
        }
    }
    return NULL;
}

static void grow(uint32_t wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* helpers handle no signals */
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

/* Set how many threads may compute the calling thread's jobs, itself included. */
void slipstream_set_threads(int64_t count) {
    wanted = count < 1 ? 1 : count > MOST ? MOST : (uint32_t)count;
}

/* The number of these threads that do not pause now. */
int64_t slipstream_present(void) {
    uint32_t away = __atomic_load_n(&team.away, __ATOMIC_RELAXED);
    return away < wanted ? wanted - away : 1;
}

void slipstream_do_alone(const Job *job) {
    Stage stage;
    for (int64_t index = 0; (stage = job->stage(job->of, index)).items >= 0; index = stage.after)
        if (stage.items) job->work(job->of, index, 0, stage.items);
}

/* True if the whole job is one chunk, so that no helper has to be woken. */
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
    begin(0, NULL);
    /* `help` waits for a change of the ticket that was compared here: the last stage may begin in
     * between, and no other stage follows it */
    for (;;) {
        uint64_t ticket = __atomic_load_n(&team.ticket, __ATOMIC_ACQUIRE);
        if (ticket >> 32 == __atomic_load_n(&team.over, __ATOMIC_ACQUIRE)) break;
        help(ticket, NULL);
    }
    pthread_mutex_unlock(&team.busy);
}
