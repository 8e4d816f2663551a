/* ends_of(chars, tokens, texts, counts), plain_ends(message, handles, chars, tokens): see
 * `received_positions`, where the same is in Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static PyObject *ends(const Py_buffer *columns, PyObject *texts) {
    Py_ssize_t num = PyList_GET_SIZE(texts);
    if (columns[0].len != 4 * num || columns[1].len != 4 * num ||
        (columns[2].len && columns[2].len != 4 * num)) {
        PyErr_SetString(PyExc_ValueError, "ends_of: columns of different lengths");
        return NULL;
    }
    PyObject *chars = PyBytes_FromStringAndSize(NULL, 4 * num);
    PyObject *tokens = PyBytes_FromStringAndSize(NULL, 4 * num);
    PyObject *found = NULL;
    if (!chars || !tokens)
        goto done;
    for (Py_ssize_t at = 0; at < num; at++) {
        PyObject *text = PyList_GET_ITEM(texts, at);
        if (!PyUnicode_Check(text)) {
            PyErr_SetString(PyExc_TypeError, "ends_of: expected a list of str");
            goto done;
        }
        uint32_t char_at, token_at, count = 1; /* columns need not be aligned */
        memcpy(&char_at, (const char *)columns[0].buf + 4 * at, 4);
        memcpy(&token_at, (const char *)columns[1].buf + 4 * at, 4);
        if (columns[2].len)
            memcpy(&count, (const char *)columns[2].buf + 4 * at, 4);
        char_at += (uint32_t)PyUnicode_GET_LENGTH(text);
        token_at += count;
        memcpy(PyBytes_AS_STRING(chars) + 4 * at, &char_at, 4);
        memcpy(PyBytes_AS_STRING(tokens) + 4 * at, &token_at, 4);
    }
    found = PyTuple_Pack(2, chars, tokens);
done:
    Py_XDECREF(chars);
    Py_XDECREF(tokens);
    return found;
}

static PyObject *ends_of(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 4 || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "ends_of: expected three columns and a list");
        return NULL;
    }
    PyObject *const given[] = {args[0], args[1], args[3]};
    Py_buffer columns[3];
    int num = 0;
    PyObject *found = NULL;
    for (; num < 3; num++)
        if (PyObject_GetBuffer(given[num], &columns[num], PyBUF_SIMPLE) < 0)
            break;
    if (num == 3)
        found = ends(columns, args[2]);
    while (num)
        PyBuffer_Release(&columns[--num]);
    return found;
}

enum { COUNTS, ENDED, ENDS, KINDS, EVENT_ENTRIES, EVENTS, NUM_EMPTY };
static PyObject *empty_names[NUM_EMPTY];
enum { VALUES, CANDIDATE_IDS, RANKS, WIDTHS, NUM_COLUMNS };
static PyObject *column_names[NUM_COLUMNS], *width_name;
static PyObject *logprobs_name, *handles_name, *chars_name, *tokens_name, *ids_name, *texts_name;

/* Whether an attribute is bytes and the same as `given`; -1: error. */
static int is_column(PyObject *message, PyObject *name, PyObject *given) {
    PyObject *column = PyObject_GetAttr(message, name);
    if (column == NULL)
        return -1;
    const Py_ssize_t size = PyBytes_GET_SIZE(given);
    const int is_same = PyBytes_Check(column) && PyBytes_GET_SIZE(column) == size &&
                        !memcmp(PyBytes_AS_STRING(column), PyBytes_AS_STRING(given), size);
    Py_DECREF(column);
    return is_same;
}

/* Whether these are the columns of `num` tokens with equally many candidates; -1: error. */
static int are_even(PyObject *logprobs, Py_ssize_t num) {
    PyObject *given = PyObject_GetAttr(logprobs, width_name);
    if (given == NULL)
        return -1;
    const Py_ssize_t width = PyLong_AsSsize_t(given);
    Py_DECREF(given);
    if (width == -1 && PyErr_Occurred())
        return -1;
    int is_right = width > 0 && num <= PY_SSIZE_T_MAX / 4 / width;
    const Py_ssize_t sizes[NUM_COLUMNS] = {is_right ? 4 * num * width : 0,
                                           is_right ? 4 * num * width : 0, 4 * num, 0};
    for (int at = 0; at < NUM_COLUMNS && is_right; at++) {
        PyObject *column = PyObject_GetAttr(logprobs, column_names[at]);
        if (column == NULL)
            return -1;
        is_right = PyBytes_Check(column) && PyBytes_GET_SIZE(column) == sizes[at];
        Py_DECREF(column);
    }
    return is_right;
}

/* Whether the message has only columns of text, ids and log-probabilities; -1: error. */
static int is_plain(PyObject *message, Py_ssize_t num) {
    PyObject *logprobs = PyObject_GetAttr(message, logprobs_name);
    if (logprobs == NULL)
        return -1;
    int is_none = logprobs == Py_None ? 1 : are_even(logprobs, num);
    Py_DECREF(logprobs);
    if (is_none < 0)
        return -1;
    for (int at = 0; at < NUM_EMPTY && is_none; at++) {
        PyObject *value = PyObject_GetAttr(message, empty_names[at]);
        if (value == NULL)
            return -1;
        const int is_true = PyObject_IsTrue(value);
        Py_DECREF(value);
        if (is_true < 0)
            return -1;
        is_none = !is_true;
    }
    return is_none;
}

static PyObject *plain_ends(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 4 || !PyBytes_CheckExact(args[1]) || !PyBytes_CheckExact(args[2]) ||
        !PyBytes_CheckExact(args[3])) {
        PyErr_SetString(PyExc_TypeError, "plain_ends: expected a message and three columns");
        return NULL;
    }
    int is_next = is_column(args[0], handles_name, args[1]);
    if (is_next > 0)
        is_next = is_column(args[0], tokens_name, args[3]);
    if (is_next > 0)
        is_next = is_column(args[0], chars_name, args[2]);
    if (is_next > 0)
        is_next = is_plain(args[0], PyBytes_GET_SIZE(args[1]) / 4);
    if (is_next <= 0)
        return is_next < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *ids = PyObject_GetAttr(args[0], ids_name), *texts = NULL, *found = NULL;
    if (ids == NULL || (texts = PyObject_GetAttr(args[0], texts_name)) == NULL)
        goto done;
    const Py_ssize_t size = PyBytes_GET_SIZE(args[1]);
    if (!PyBytes_Check(ids) || PyBytes_GET_SIZE(ids) != size || !PyList_CheckExact(texts) ||
        4 * PyList_GET_SIZE(texts) != size) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    const Py_buffer columns[3] = {
        {.buf = PyBytes_AS_STRING(args[2]), .len = PyBytes_GET_SIZE(args[2])},
        {.buf = PyBytes_AS_STRING(args[3]), .len = PyBytes_GET_SIZE(args[3])},
        {.len = 0},
    };
    found = ends(columns, texts);
done:
    Py_XDECREF(ids);
    Py_XDECREF(texts);
    return found;
}

static int intern_names(void) {
    const struct {
        PyObject **name;
        const char *text;
    } all[] = {
        {&empty_names[COUNTS], "counts"},
        {&empty_names[ENDED], "ended"},
        {&empty_names[ENDS], "ends"},
        {&empty_names[KINDS], "kinds"},
        {&empty_names[EVENT_ENTRIES], "event_entries"},
        {&empty_names[EVENTS], "events"},
        {&logprobs_name, "logprobs"},
        {&width_name, "width"},
        {&column_names[VALUES], "values"},
        {&column_names[CANDIDATE_IDS], "ids"},
        {&column_names[RANKS], "ranks"},
        {&column_names[WIDTHS], "widths"},
        {&handles_name, "handles"},
        {&chars_name, "chars"},
        {&tokens_name, "tokens"},
        {&ids_name, "token_ids"},
        {&texts_name, "texts"},
    };
    for (size_t at = 0; at < sizeof all / sizeof all[0]; at++)
        if ((*all[at].name = PyUnicode_InternFromString(all[at].text)) == NULL)
            return -1;
    return 0;
}

static PyMethodDef methods[] = {
    {"plain_ends", (PyCFunction)(void (*)(void))plain_ends, METH_FASTCALL, NULL},
    {"ends_of", (PyCFunction)(void (*)(void))ends_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "entry_ends", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_entry_ends(void) {
    return intern_names() < 0 ? NULL : PyModule_Create(&module);
}
