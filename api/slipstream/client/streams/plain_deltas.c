/* take_plain_deltas(link, message, found, now): see plain_deltas.py.
 *
 * Everything that a message could be left alone for is looked at before anything is written, so one
 * that is not taken has had no effect.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "link_numbers.h"
#include "msgpack.h"

#define DELTAS_TAG 22 /* as in tags.py */
#define DELTAS_FIELDS 13
#define LOGPROB_FIELDS 5

static PyTypeObject *numbers_type; /* see `prepare` */
static PyObject *deltas_type, *columns_type, *no_bytes, *no_ends;
static PyObject *handles_name, *chars_name, *tokens_name;

typedef struct {
    const uint8_t *at;
    size_t num_bytes;
} Span;

typedef struct {
    Py_ssize_t num; /* entries */
    uint64_t seq, ack, width;
    Span ids, columns[3]; /* of log-probabilities: values, ids and ranks */
    PyObject *texts;
} Plain;

/* A column that is the same as `given`. */
static void expect_column(Reader *reader, PyObject *given)
{
    size_t num_bytes;
    const uint8_t *column = read_column(reader, &num_bytes);
    if (reader->has_failed || num_bytes != (size_t)PyBytes_GET_SIZE(given) ||
        memcmp(column, PyBytes_AS_STRING(given), num_bytes))
        reader->has_failed = true;
}

static void expect_no_column(Reader *reader)
{
    size_t num_bytes;
    read_column(reader, &num_bytes);
    if (num_bytes)
        reader->has_failed = true;
}

/* One text to each entry; NULL where there is another number, or one is no text. */
static PyObject *read_texts(Reader *reader, Py_ssize_t num)
{
    if (read_array(reader) != (uint64_t)num || reader->has_failed)
        return NULL;
    PyObject *texts = PyList_New(num);
    for (Py_ssize_t at = 0; at < num && texts != NULL; at++) {
        size_t num_bytes;
        const uint8_t *text = read_text(reader, &num_bytes);
        PyObject *one = reader->has_failed ? NULL
                                           : PyUnicode_DecodeUTF8((const char *)text,
                                                                  (Py_ssize_t)num_bytes, NULL);
        if (one == NULL)
            Py_CLEAR(texts);
        else
            PyList_SET_ITEM(texts, at, one);
    }
    return texts;
}

/* Columns with equally many candidates of each token, or none. */
static void read_logprobs(Reader *reader, Plain *plain)
{
    if (reader->at < reader->end && *reader->at == 0xc0) {
        reader->at++;
        return;
    }
    expect(reader, 0x90 | LOGPROB_FIELDS);
    plain->width = read_number(reader);
    if (plain->width < 1 || plain->width > UINT32_MAX)
        reader->has_failed = true;
    for (int at = 0; at < 3; at++) {
        Span *column = &plain->columns[at];
        column->at = read_column(reader, &column->num_bytes);
        if (column->num_bytes / 4 != (size_t)plain->num * (at < 2 ? plain->width : 1) ||
            column->num_bytes % 4)
            reader->has_failed = true;
    }
    expect_no_column(reader);
}

/* Whether the message is the link's next one, and continues the streams; then `texts` is set. */
static bool read_plain(const Numbers *link, PyObject *message, PyObject *const *columns,
                       Plain *plain)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(message);
    Reader reader = {data, data + PyBytes_GET_SIZE(message), false};
    expect(&reader, 0x94);
    const uint64_t epoch = read_number(&reader);
    plain->seq = read_number(&reader);
    plain->ack = read_number(&reader);
    expect(&reader, 0x90 | DELTAS_FIELDS);
    expect(&reader, DELTAS_TAG);
    if (reader.has_failed || plain->seq != (uint64_t)link->received + 1 ||
        plain->ack > (uint64_t)link->sent || epoch != PyLong_AsUnsignedLongLong(link->epoch))
        return false;
    for (int at = 0; at < 3; at++)
        expect_column(&reader, columns[at]);
    if (reader.has_failed || (plain->texts = read_texts(&reader, plain->num)) == NULL)
        return false;
    plain->ids.at = read_column(&reader, &plain->ids.num_bytes);
    if (plain->ids.num_bytes != 4 * (size_t)plain->num)
        reader.has_failed = true;
    expect_no_column(&reader); /* counts */
    expect_no_column(&reader); /* ended */
    expect(&reader, 0x90);     /* ends */
    read_logprobs(&reader, plain);
    expect_no_column(&reader); /* kinds */
    expect_no_column(&reader); /* entries with events */
    expect(&reader, 0x90);     /* and these */
    return !reader.has_failed && reader.at == reader.end;
}

static PyObject *bytes_of(Span span)
{
    return PyBytes_FromStringAndSize((const char *)span.at, (Py_ssize_t)span.num_bytes);
}

static PyObject *logprobs_of(const Plain *plain)
{
    if (!plain->width)
        return Py_NewRef(Py_None);
    PyObject *args[LOGPROB_FIELDS - 1] = {PyLong_FromUnsignedLongLong(plain->width),
                                          bytes_of(plain->columns[0]), bytes_of(plain->columns[1]),
                                          bytes_of(plain->columns[2])};
    PyObject *columns = NULL;
    if (args[0] != NULL && args[1] != NULL && args[2] != NULL && args[3] != NULL)
        columns = PyObject_Vectorcall(columns_type, args, LOGPROB_FIELDS - 1, NULL);
    for (int at = 0; at < LOGPROB_FIELDS - 1; at++)
        Py_XDECREF(args[at]);
    return columns;
}

/* A u32 column, each value larger by 1, or by the length of its text. */
static PyObject *moved(PyObject *column, PyObject *texts)
{
    const Py_ssize_t num = PyBytes_GET_SIZE(column) / 4;
    PyObject *next = PyBytes_FromStringAndSize(NULL, 4 * num);
    for (Py_ssize_t at = 0; at < num && next != NULL; at++) {
        uint32_t value; /* columns need not be aligned */
        memcpy(&value, PyBytes_AS_STRING(column) + 4 * at, 4);
        value += texts == NULL ? 1 : (uint32_t)PyUnicode_GET_LENGTH(PyList_GET_ITEM(texts, at));
        memcpy(PyBytes_AS_STRING(next) + 4 * at, &value, 4);
    }
    return next;
}

/* The message, and behind it where its entries end; NULL: error. */
static PyObject *deltas_of(const Plain *plain, PyObject *const *columns)
{
    PyObject *ids = bytes_of(plain->ids), *logprobs = logprobs_of(plain), *deltas = NULL;
    if (ids != NULL && logprobs != NULL) {
        PyObject *const args[] = {columns[0], columns[1], columns[2], plain->texts, ids,
                                  no_bytes,   no_bytes,   no_ends,    logprobs};
        deltas = PyObject_Vectorcall(deltas_type, args, 9, NULL);
    }
    Py_XDECREF(ids);
    Py_XDECREF(logprobs);
    return deltas;
}

/* Set where the streams are behind the message; -1: error. */
static int move(PyObject *found, PyObject *const *columns, PyObject *texts)
{
    PyObject *chars = moved(columns[1], texts), *tokens = moved(columns[2], NULL);
    const int failed = chars == NULL || tokens == NULL ||
                       PyObject_SetAttr(found, chars_name, chars) < 0 ||
                       PyObject_SetAttr(found, tokens_name, tokens) < 0;
    Py_XDECREF(chars);
    Py_XDECREF(tokens);
    return failed ? -1 : 0;
}

static PyObject *take_plain_deltas(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    (void)module;
    if (num_args != 4 || numbers_type == NULL || !PyObject_TypeCheck(args[0], numbers_type) ||
        !PyBytes_CheckExact(args[1]) || !PyFloat_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "take_plain_deltas: a link, bytes, streams and a float");
        return NULL;
    }
    Numbers *link = (Numbers *)args[0];
    PyObject *columns[3] = {PyObject_GetAttr(args[2], handles_name),
                            PyObject_GetAttr(args[2], chars_name),
                            PyObject_GetAttr(args[2], tokens_name)};
    PyObject *deltas = NULL;
    Plain plain = {0};
    for (int at = 0; at < 3; at++)
        if (columns[at] == NULL || !PyBytes_CheckExact(columns[at]) ||
            PyBytes_GET_SIZE(columns[at]) != PyBytes_GET_SIZE(columns[0])) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "take_plain_deltas: three columns of one length");
            goto done;
        }
    plain.num = PyBytes_GET_SIZE(columns[0]) / 4;
    if (!read_plain(link, args[1], columns, &plain)) {
        PyErr_Clear(); /* the other way tells */
        deltas = Py_NewRef(Py_None);
        goto done;
    }
    deltas = deltas_of(&plain, columns);
    if (deltas != NULL && move(args[2], columns, plain.texts) < 0)
        Py_CLEAR(deltas);
    if (deltas != NULL) {
        heard(link, (long long)plain.ack, PyFloat_AS_DOUBLE(args[3]));
        link->received = (long long)plain.seq;
    }
done:
    Py_XDECREF(plain.texts);
    for (int at = 0; at < 3; at++)
        Py_XDECREF(columns[at]);
    return deltas;
}

/* prepare(LinkNumbers, Deltas, LogprobColumns): the types of what it works on and makes */
static PyObject *prepare(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *types[3];
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyType_Type, &types[0], &PyType_Type, &types[1],
                          &PyType_Type, &types[2]))
        return NULL;
    Py_XSETREF(numbers_type, (PyTypeObject *)Py_NewRef(types[0]));
    Py_XSETREF(deltas_type, Py_NewRef(types[1]));
    Py_XSETREF(columns_type, Py_NewRef(types[2]));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"take_plain_deltas", (PyCFunction)(void (*)(void))take_plain_deltas, METH_FASTCALL, NULL},
    {"prepare", prepare, METH_VARARGS, NULL},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "plain_deltas", 0, -1, functions, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_plain_deltas(void)
{
    handles_name = PyUnicode_InternFromString("handles");
    chars_name = PyUnicode_InternFromString("chars");
    tokens_name = PyUnicode_InternFromString("tokens");
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    no_ends = PyTuple_New(0);
    if (!handles_name || !chars_name || !tokens_name || !no_bytes || !no_ends)
        return NULL;
    return PyModule_Create(&definition);
}
