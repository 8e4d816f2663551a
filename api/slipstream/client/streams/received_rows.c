/* Lookups of the entries of a message among a client's streams, and the ids that streams keep.
 *
 * find and are_at do what ReceivedPositions does in numpy, add_ids what ReceivedIds does; tests hold
 * them together. Columns of messages come from another process: their lengths are compared before
 * anything is read, and rows are checked against the buffers that they index.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

static uint32_t u32_at(const char *column, Py_ssize_t at)
{
    uint32_t value; /* columns need not be aligned */
    memcpy(&value, column + 4 * at, 4);
    return value;
}

/* A contiguous array of `size` bytes to an item, with `num` items unless that is -1. */
static int take(PyObject *given, Py_buffer *view, int flags, Py_ssize_t size, Py_ssize_t num)
{
    if (PyObject_GetBuffer(given, view, flags) < 0) {
        view->obj = NULL;
        return -1;
    }
    if (view->itemsize == size && (num < 0 || view->len == size * num) &&
        (uintptr_t)view->buf % size == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "an array of %zd bytes in items of %zd, expected %zd of %zd",
                 view->len, view->itemsize, num, size);
    return -1;
}

static void release(Py_buffer *views, int num)
{
    for (int i = 0; i < num; i++)
        if (views[i].obj != NULL)
            PyBuffer_Release(&views[i]);
}

static int check_num_args(Py_ssize_t given, Py_ssize_t expected)
{
    if (given == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", given, expected);
    return -1;
}

static int check_bytes(PyObject *given, Py_ssize_t num)
{
    if (PyBytes_Check(given) && (num < 0 ? PyBytes_GET_SIZE(given) % 4 == 0
                                         : PyBytes_GET_SIZE(given) == 4 * num))
        return 0;
    PyErr_SetString(PyExc_ValueError, "a column of another length, or not of bytes");
    return -1;
}

/* ---- rows ------------------------------------------------------------------------------- */

/* The objects of an array of dtype object at these rows. */
static PyObject *objects_at(const Py_buffer *array, const int64_t *rows, Py_ssize_t num)
{
    PyObject *found = PyList_New(num), **objects = array->buf;
    for (Py_ssize_t i = 0; i < num && found != NULL; i++) {
        PyObject *object = objects[rows[i]];
        PyList_SET_ITEM(found, i, Py_NewRef(object == NULL ? Py_None : object));
    }
    return found;
}

/* find(handles, row_handles, scratch, group_ids, numbers, items) -> (rows, group, objects), or None
 * unless all handles are known and distinct. The objects are the numbers of a group, else items. */
static PyObject *find(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    enum { HANDLES, SCRATCH, GROUPS, NUMBERS, ITEMS, NUM };
    Py_buffer in[NUM] = {0};
    PyObject *rows_made = NULL, *objects = NULL, *found = NULL;
    if (check_num_args(num_args, 6) < 0 || check_bytes(args[0], -1) < 0 ||
        take(args[1], &in[HANDLES], PyBUF_ND, 8, -1) < 0)
        goto done;
    Py_ssize_t num_rows = in[HANDLES].len / 8, num = PyBytes_GET_SIZE(args[0]) / 4;
    if (num_rows < 1 || (num_rows & (num_rows - 1))) {
        PyErr_Format(PyExc_ValueError, "%zd rows, expected a power of two", num_rows);
        goto done;
    }
    if (take(args[2], &in[SCRATCH], PyBUF_ND | PyBUF_WRITABLE, 8, num_rows) < 0 ||
        take(args[3], &in[GROUPS], PyBUF_ND, 8, num_rows) < 0 ||
        take(args[4], &in[NUMBERS], PyBUF_ND | PyBUF_FORMAT, sizeof(PyObject *), num_rows) < 0 ||
        take(args[5], &in[ITEMS], PyBUF_ND | PyBUF_FORMAT, sizeof(PyObject *), num_rows) < 0)
        goto done;
    if (strcmp(in[NUMBERS].format, "O") || strcmp(in[ITEMS].format, "O")) {
        PyErr_SetString(PyExc_TypeError, "numbers, items: expected arrays of objects");
        goto done;
    }
    rows_made = PyBytes_FromStringAndSize(NULL, 8 * num);
    if (rows_made == NULL)
        goto done;
    const char *handles = PyBytes_AS_STRING(args[0]);
    const int64_t *row_handles = in[HANDLES].buf, *groups = in[GROUPS].buf;
    int64_t *scratch = in[SCRATCH].buf, *rows = (int64_t *)PyBytes_AS_STRING(rows_made);
    int64_t group = 0;
    for (Py_ssize_t i = 0; i < num; i++) {
        uint32_t handle = u32_at(handles, i);
        rows[i] = handle & (uint64_t)(num_rows - 1);
        if (row_handles[rows[i]] != handle)
            goto unknown;
        scratch[rows[i]] = i;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        if (scratch[rows[i]] != i)
            goto unknown;
        if (i == 0)
            group = groups[rows[i]];
        else if (groups[rows[i]] != group)
            group = 0;
    }
    objects = objects_at(&in[group ? NUMBERS : ITEMS], rows, num);
    if (objects != NULL)
        found = Py_BuildValue("(OLO)", rows_made, (long long)group, objects);
    goto done;
unknown:
    found = Py_NewRef(Py_None);
done:
    Py_XDECREF(rows_made);
    Py_XDECREF(objects);
    release(in, NUM);
    return found;
}

/* are_at(rows, chars, tokens, row_chars, row_tokens) -> whether these rows have these positions */
static PyObject *are_at(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    enum { ROWS, CHARS, TOKENS, NUM };
    Py_buffer in[NUM] = {0};
    PyObject *found = NULL;
    if (check_num_args(num_args, 5) < 0 || take(args[0], &in[ROWS], PyBUF_ND, 8, -1) < 0 ||
        check_bytes(args[1], in[ROWS].len / 8) < 0 || check_bytes(args[2], in[ROWS].len / 8) < 0 ||
        take(args[3], &in[CHARS], PyBUF_ND, 4, -1) < 0 ||
        take(args[4], &in[TOKENS], PyBUF_ND, 4, in[CHARS].len / 4) < 0)
        goto done;
    const int64_t *rows = in[ROWS].buf, num_rows = in[CHARS].len / 4;
    const uint32_t *row_chars = in[CHARS].buf, *row_tokens = in[TOKENS].buf;
    const char *chars = PyBytes_AS_STRING(args[1]), *tokens = PyBytes_AS_STRING(args[2]);
    Py_ssize_t num = in[ROWS].len / 8, i = 0;
    for (; i < num; i++) {
        if (rows[i] < 0 || rows[i] >= num_rows) {
            PyErr_Format(PyExc_IndexError, "row %lld of %lld", (long long)rows[i],
                         (long long)num_rows);
            goto done;
        }
        if (row_chars[rows[i]] != u32_at(chars, i) || row_tokens[rows[i]] != u32_at(tokens, i))
            break;
    }
    found = PyBool_FromLong(i == num);
done:
    release(in, NUM);
    return found;
}

/* ---- ids -------------------------------------------------------------------------------- */

#define MOST_HANDLES (1 << 20) /* between the smallest and the largest that are sorted at once */

typedef struct {
    const char *handles, *ids, *counts; /* counts: NULL: one each */
    Py_ssize_t num;
} Message;

static int take_message(PyObject *given, Message *message)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a message: expected (handles, ids, counts)");
        return -1;
    }
    PyObject *handles = PyTuple_GET_ITEM(given, 0), *ids = PyTuple_GET_ITEM(given, 1);
    PyObject *counts = PyTuple_GET_ITEM(given, 2);
    if (check_bytes(handles, -1) < 0 || check_bytes(ids, -1) < 0 || check_bytes(counts, -1) < 0)
        return -1;
    message->num = PyBytes_GET_SIZE(handles) / 4;
    message->handles = PyBytes_AS_STRING(handles);
    message->ids = PyBytes_AS_STRING(ids);
    message->counts = PyBytes_GET_SIZE(counts) ? PyBytes_AS_STRING(counts) : NULL;
    if (message->counts != NULL && check_bytes(counts, message->num) < 0)
        return -1;
    uint64_t total = message->counts == NULL ? (uint64_t)message->num : 0;
    for (Py_ssize_t i = 0; i < message->num && message->counts != NULL; i++)
        total += u32_at(message->counts, i);
    if (total > PY_SSIZE_T_MAX / 4) {
        PyErr_SetString(PyExc_ValueError, "counts: more than fit");
        return -1;
    }
    return check_bytes(ids, (Py_ssize_t)total);
}

static uint32_t count_of(const Message *message, Py_ssize_t at)
{
    return message->counts == NULL ? 1 : u32_at(message->counts, at);
}

/* Append a stream's ids to those that it has, if they are kept. */
static int append_ids(PyObject *kept, uint32_t handle, const char *ids, Py_ssize_t num)
{
    PyObject *key = PyLong_FromUnsignedLong(handle);
    if (key == NULL)
        return -1;
    PyObject *own = PyDict_GetItemWithError(kept, key);
    Py_DECREF(key);
    if (own == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyByteArray_Check(own)) {
        PyErr_SetString(PyExc_TypeError, "kept: expected arrays of bytes");
        return -1;
    }
    Py_ssize_t size = PyByteArray_GET_SIZE(own);
    if (PyByteArray_Resize(own, size + 4 * num) < 0)
        return -1;
    memcpy(PyByteArray_AS_STRING(own) + size, ids, 4 * num);
    return 0;
}

/* add_ids(kept, messages) -> whether the ids were added; False where the handles are too far apart.
 * kept: dict of bytearrays by handle. messages: list of (handles, ids, counts), in order. */
static PyObject *add_ids(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (check_num_args(num_args, 2) < 0)
        return NULL;
    if (!PyDict_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a dict and a list");
        return NULL;
    }
    Py_ssize_t num_messages = PyList_GET_SIZE(args[1]), *ends = NULL;
    Message *messages = PyMem_Calloc(num_messages + 1, sizeof(Message));
    char *sorted = NULL;
    PyObject *found = NULL;
    uint32_t low = UINT32_MAX, high = 0;
    if (messages == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < num_messages; i++) {
        if (take_message(PyList_GET_ITEM(args[1], i), &messages[i]) < 0)
            goto done;
        for (Py_ssize_t j = 0; j < messages[i].num; j++) {
            uint32_t handle = u32_at(messages[i].handles, j);
            low = handle < low ? handle : low;
            high = handle > high ? handle : high;
        }
    }
    if (high < low || high - low >= MOST_HANDLES) {
        found = PyBool_FromLong(high < low);
        goto done;
    }
    /* counting sort: ends[h] is where handle low + h ends, at first where it begins */
    ends = PyMem_Calloc(high - low + 2, sizeof(Py_ssize_t));
    if (ends == NULL)
        goto no_memory;
    for (Py_ssize_t i = 0; i < num_messages; i++)
        for (Py_ssize_t j = 0; j < messages[i].num; j++)
            ends[u32_at(messages[i].handles, j) - low + 1] += count_of(&messages[i], j);
    for (uint32_t h = 0; h <= high - low; h++)
        ends[h + 1] += ends[h];
    sorted = PyMem_Malloc(4 * ends[high - low + 1] + 1);
    if (sorted == NULL)
        goto no_memory;
    for (Py_ssize_t i = 0; i < num_messages; i++) {
        const char *ids = messages[i].ids;
        for (Py_ssize_t j = 0; j < messages[i].num; j++) {
            Py_ssize_t *end = &ends[u32_at(messages[i].handles, j) - low];
            uint32_t count = count_of(&messages[i], j);
            memcpy(sorted + 4 * *end, ids, 4 * (size_t)count);
            *end += count;
            ids += 4 * (size_t)count;
        }
    }
    for (uint32_t h = 0; h <= high - low; h++) {
        Py_ssize_t begin = h ? ends[h - 1] : 0;
        if (ends[h] > begin &&
            append_ids(args[0], low + h, sorted + 4 * begin, ends[h] - begin) < 0)
            goto done;
    }
    found = Py_NewRef(Py_True);
    goto done;
no_memory:
    PyErr_NoMemory();
done:
    PyMem_Free(messages);
    PyMem_Free(ends);
    PyMem_Free(sorted);
    return found;
}

/* ---- the module ------------------------------------------------------------------------- */

#define FUNCTION(name, given) {name, (PyCFunction)(void (*)(void))given, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FUNCTION("find_rows", find),
    FUNCTION("rows_are_at", are_at),
    FUNCTION("add_received_ids", add_ids),
    {NULL, NULL, 0, NULL},
};

int add_received_rows(PyObject *module) { return PyModule_AddFunctions(module, methods); }
