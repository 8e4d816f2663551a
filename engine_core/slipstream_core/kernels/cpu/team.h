/* Jobs in stages, computed by a team of threads. */

#ifndef SLIPSTREAM_TEAM_H
#define SLIPSTREAM_TEAM_H

#include <stdint.h>

typedef struct {
    int64_t items; /* independent of each other, computed in any order */
    int64_t chunk; /* items to claim at once, some microseconds of work */
    int64_t after; /* index of the next stage, which begins when all items of this one are done */
    int64_t waits; /* one chunk, which waits for another process more than it computes */
} Stage;

#define NO_STAGE ((Stage){-1, 0, 0, 0})

typedef struct {
    Stage (*stage)(const void *of, int64_t index); /* from 0 on; NO_STAGE when the job is done */
    void (*work)(const void *of, int64_t index, int64_t first, int64_t last);
    const void *of;
} Job;

void slipstream_do(const Job *job);
void slipstream_do_alone(const Job *job);
void slipstream_set_threads(int64_t count);
int64_t slipstream_present(void);

#endif
