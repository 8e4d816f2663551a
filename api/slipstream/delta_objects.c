/* The Python objects of deltas: ids and log-probabilities, made from the columns of a message.
 *
 * EntryObjects does the same as the methods token_ids and logprobs of DeltaBatch, which are the
 * reference; a test holds the two together. ColumnGetter replaces a property of Delta, and
 * DeltaMaker calls its class. Columns come from another process: their lengths are compared with
 * each other before anything is read.
 */
#include "module.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "slots.h"

enum { IDS, COUNTS, VALUES, CANDIDATES, RANKS, WIDTHS, NUM_COLUMNS };

typedef struct {
    PyObject_HEAD
    PyObject *logprob; /* the class */
    PyObject *columns[NUM_COLUMNS]; /* bytes, or NULL */
    Py_ssize_t num;                 /* entries */
    Py_ssize_t width;               /* of each token's candidates; -1: by entry; 0: none */
    /* [num + 1], the first token, candidate and rank of each entry; NULL where each has one token
     * and all have the same width */
    Py_ssize_t *firsts;
} EntryObjects;

static uint32_t u32_at(const EntryObjects *self, int column, Py_ssize_t at)
{
    uint32_t value; /* columns need not be aligned */
    memcpy(&value, PyBytes_AS_STRING(self->columns[column]) + 4 * at, 4);
    return value;
}

static Py_ssize_t length_of(const EntryObjects *self, int column)
{
    return self->columns[column] == NULL ? 0 : PyBytes_GET_SIZE(self->columns[column]);
}

/* ---- where an entry lies ---------------------------------------------------------------- */

typedef struct {
    Py_ssize_t token, num_tokens, width, candidate, rank;
} Place;

/* The part of an entry behind its first `skip` tokens. */
static Place place_of(const EntryObjects *self, Py_ssize_t entry, Py_ssize_t skip)
{
    Place at;
    if (self->firsts == NULL)
        at = (Place){entry, 1, self->width, entry * self->width, entry};
    else {
        const Py_ssize_t *first = self->firsts + 3 * entry;
        at = (Place){first[0], first[3] - first[0], self->width, first[1], first[2]};
        if (at.width < 0)
            at.width = u32_at(self, WIDTHS, entry);
    }
    skip = skip < at.num_tokens ? skip : at.num_tokens;
    at.token += skip;
    at.num_tokens -= skip;
    at.candidate += skip * at.width;
    at.rank += at.width ? skip : 0;
    return at;
}

static int lay_out(EntryObjects *self)
{
    Py_ssize_t tokens = 0, candidates = 0, ranks = 0;
    if (self->columns[COUNTS] == NULL && self->width >= 0) {
        tokens = self->num;
        candidates = self->num * self->width;
        ranks = self->width ? self->num : 0;
    } else {
        self->firsts = PyMem_Malloc(3 * (self->num + 1) * sizeof(Py_ssize_t));
        if (self->firsts == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (Py_ssize_t i = 0;; i++) {
            Py_ssize_t *first = self->firsts + 3 * i;
            first[0] = tokens;
            first[1] = candidates;
            first[2] = ranks;
            if (i == self->num)
                break;
            Py_ssize_t count = self->columns[COUNTS] == NULL ? 1 : u32_at(self, COUNTS, i);
            Py_ssize_t width = self->width < 0 ? u32_at(self, WIDTHS, i) : self->width;
            Py_ssize_t more;
            tokens += count; /* at most 2**32 entries of 2**32 tokens: no overflow */
            ranks += width ? count : 0;
            if (__builtin_mul_overflow(count, width, &more) ||
                __builtin_add_overflow(candidates, more, &candidates)) {
                PyErr_SetString(PyExc_ValueError, "logprobs: more than fit");
                return -1;
            }
        }
    }
    if (tokens > PY_SSIZE_T_MAX / 4 || candidates > PY_SSIZE_T_MAX / 4 ||
        length_of(self, IDS) != 4 * tokens || length_of(self, VALUES) != 4 * candidates ||
        length_of(self, CANDIDATES) != 4 * candidates || length_of(self, RANKS) != 4 * ranks) {
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
        return -1;
    }
    return 0;
}

/* ---- objects ---------------------------------------------------------------------------- */

static PyObject *ids_of(const EntryObjects *self, Py_ssize_t entry, Py_ssize_t skip)
{
    Place at = place_of(self, entry, skip);
    PyObject *ids = PyList_New(at.num_tokens);
    for (Py_ssize_t i = 0; i < at.num_tokens && ids != NULL; i++) {
        PyObject *id = PyLong_FromUnsignedLong(u32_at(self, IDS, at.token + i));
        if (id == NULL)
            Py_CLEAR(ids);
        else
            PyList_SET_ITEM(ids, i, id);
    }
    return ids;
}

/* Add Logprob(value, rank, id) to a token's candidates. */
static int add_candidate(const EntryObjects *self, PyObject *found, Py_ssize_t at, uint32_t rank)
{
    float value;
    memcpy(&value, PyBytes_AS_STRING(self->columns[VALUES]) + 4 * at, 4);
    PyObject *fields[4] = {NULL, PyFloat_FromDouble((double)value), PyLong_FromUnsignedLong(rank),
                           PyLong_FromUnsignedLong(u32_at(self, CANDIDATES, at))};
    PyObject *made = NULL;
    if (fields[1] != NULL && fields[2] != NULL && fields[3] != NULL)
        made = PyObject_Vectorcall(self->logprob, fields + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                   NULL);
    int failed = made == NULL || PyDict_SetItem(found, fields[3], made) < 0;
    Py_XDECREF(made);
    for (int i = 1; i < 4; i++)
        Py_XDECREF(fields[i]);
    return failed ? -1 : 0;
}

static PyObject *new_dict(Py_ssize_t num)
{
#if PY_VERSION_HEX < 0x030D0000
    return _PyDict_NewPresized(num);
#else
    (void)num;
    return PyDict_New();
#endif
}

static PyObject *logprobs_of(const EntryObjects *self, Py_ssize_t entry, Py_ssize_t skip)
{
    Place at = place_of(self, entry, skip);
    if (!at.width)
        Py_RETURN_NONE;
    PyObject *positions = PyList_New(at.num_tokens);
    for (Py_ssize_t i = 0; i < at.num_tokens && positions != NULL; i++) {
        PyObject *found = new_dict(at.width);
        uint32_t rank = u32_at(self, RANKS, at.rank + i); /* the likeliest follow, in order */
        Py_ssize_t first = at.candidate + i * at.width;
        for (Py_ssize_t j = 0; j < at.width && found != NULL; j++)
            if (add_candidate(self, found, first + j, j ? (uint32_t)j : rank) < 0)
                Py_CLEAR(found);
        if (found == NULL)
            Py_CLEAR(positions);
        else
            PyList_SET_ITEM(positions, i, found);
    }
    return positions;
}

/* ---- EntryObjects ----------------------------------------------------------------------- */

static int take_bytes(EntryObjects *self, int column, PyObject *given)
{
    if (!PyBytes_Check(given)) {
        PyErr_Format(PyExc_TypeError, "column %d: expected bytes", column);
        return -1;
    }
    if (PyBytes_GET_SIZE(given))
        self->columns[column] = Py_NewRef(given);
    return 0;
}

static PyTypeObject *objects_type; /* EntryObjects: the module is loaded once in a process */

/* The objects of `num` entries with these columns; NULL: error. */
static PyObject *objects_of(Py_ssize_t num, Py_ssize_t width, PyObject *const *given,
                            PyObject *logprob)
{
    if (num < 0 || num > UINT32_MAX || width < 0 || width > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "num, width: out of range");
        return NULL;
    }
    EntryObjects *self = (EntryObjects *)objects_type->tp_alloc(objects_type, 0);
    if (self == NULL)
        return NULL;
    self->logprob = Py_NewRef(logprob);
    self->num = num;
    for (int i = 0; i < NUM_COLUMNS; i++)
        if (take_bytes(self, i, given[i]) < 0)
            goto failed;
    self->width = self->columns[WIDTHS] == NULL ? width : -1;
    if ((self->columns[COUNTS] != NULL && length_of(self, COUNTS) != 4 * num) ||
        (self->columns[WIDTHS] != NULL && length_of(self, WIDTHS) != 4 * num)) {
        PyErr_SetString(PyExc_ValueError, "columns of different lengths");
        goto failed;
    }
    if (lay_out(self) < 0)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* EntryObjects(num, token_ids, counts, width, values, ids, ranks, widths, Logprob) */
static PyObject *new_objects(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *given[NUM_COLUMNS], *logprob;
    Py_ssize_t num, width;
    (void)type; /* it has no subtypes */
    if (keywords != NULL && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "EntryObjects takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "nOOnOOOOO", &num, &given[IDS], &given[COUNTS], &width,
                          &given[VALUES], &given[CANDIDATES], &given[RANKS], &given[WIDTHS],
                          &logprob))
        return NULL;
    return objects_of(num, width, given, logprob);
}

static void dealloc_objects(PyObject *object)
{
    EntryObjects *self = (EntryObjects *)object;
    Py_XDECREF(self->logprob);
    for (int i = 0; i < NUM_COLUMNS; i++)
        Py_XDECREF(self->columns[i]);
    PyMem_Free(self->firsts);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

typedef PyObject *(*Make)(const EntryObjects *, Py_ssize_t, Py_ssize_t);

static PyObject *make_checked(const EntryObjects *self, Make make, PyObject *entry, PyObject *skip)
{
    Py_ssize_t at = PyLong_AsSsize_t(entry);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t skipped = PyLong_AsSsize_t(skip);
    if (skipped == -1 && PyErr_Occurred())
        return NULL;
    if (at < 0 || at >= self->num || skipped < 0) {
        PyErr_Format(PyExc_IndexError, "entry %zd of %zd, without %zd tokens", at, self->num,
                     skipped);
        return NULL;
    }
    return make(self, at, skipped);
}

static PyObject *make_of_args(PyObject *self, Make make, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected 2", num_args);
        return NULL;
    }
    return make_checked((const EntryObjects *)self, make, args[0], args[1]);
}

static PyObject *token_ids(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    return make_of_args(self, ids_of, args, num_args);
}

static PyObject *logprobs(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    return make_of_args(self, logprobs_of, args, num_args);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef object_methods[] = {METHOD(token_ids), METHOD(logprobs), {NULL, NULL, 0, NULL}};
static PyType_Slot object_slots[] = {{Py_tp_new, new_objects},
                                     {Py_tp_dealloc, dealloc_objects},
                                     {Py_tp_methods, object_methods},
                                     {0, NULL}};
static PyType_Spec object_spec = {
    .name = "slipstream._native.EntryObjects",
    .basicsize = sizeof(EntryObjects),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = object_slots,
};

/* ---- the fields of a Delta -------------------------------------------------------------- */

enum { TEXT, BATCH, ENTRY, SKIP, IN_DELTA };
static const char *const delta_fields[] = {"text", "_batch", "_entry", "_skip"};

/* ---- ColumnGetter ----------------------------------------------------------------------- */

static PyObject *objects_name; /* "objects", the attribute of DeltaBatch */
static PyObject *no_bytes;

enum { OWNER, BATCH_TYPE, MESSAGE_TYPE, COLUMNS_TYPE, NUM_TYPES };
enum { MESSAGE, OBJECTS, IN_BATCH };
enum { TEXTS, TOKEN_IDS, TOKEN_COUNTS, LOGPROBS, IN_MESSAGE };
enum { WIDTH, IN_COLUMNS = WIDTH + 5 }; /* behind it as in EntryObjects from VALUES on */
static const char *const batch_fields[] = {"message", "_objects"};
static const char *const message_fields[] = {"texts", "token_ids", "counts", "logprobs"};
static const char *const columns_fields[] = {"width", "values", "ids", "ranks", "widths"};

typedef struct {
    PyObject_HEAD
    PyTypeObject *types[NUM_TYPES]; /* Delta, DeltaBatch, Deltas and LogprobColumns */
    PyObject *doc, *logprob;        /* the class Logprob */
    Make make;
    Py_ssize_t in_delta[IN_DELTA], in_batch[IN_BATCH], in_message[IN_MESSAGE],
        in_columns[IN_COLUMNS];
} ColumnGetter;

/* ColumnGetter(owner, name, doc, (batch, message, columns), logprob); name: "token_ids" or
 * "logprobs" */
static PyObject *new_getter(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    PyTypeObject *given[NUM_TYPES];
    PyObject *doc, *logprob;
    const char *name;
    if (!PyArg_ParseTuple(args, "O!sO(O!O!O!)O", &PyType_Type, &given[OWNER], &name, &doc,
                          &PyType_Type, &given[BATCH_TYPE], &PyType_Type, &given[MESSAGE_TYPE],
                          &PyType_Type, &given[COLUMNS_TYPE], &logprob))
        return NULL;
    ColumnGetter *self = (ColumnGetter *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    for (int at = 0; at < NUM_TYPES; at++)
        self->types[at] = (PyTypeObject *)Py_NewRef(given[at]);
    self->doc = Py_NewRef(doc), self->logprob = Py_NewRef(logprob);
    self->make = strcmp(name, "token_ids") == 0 ? ids_of : logprobs_of;
    if (find_offsets(given[OWNER], delta_fields, IN_DELTA, self->in_delta) < 0 ||
        find_offsets(given[BATCH_TYPE], batch_fields, IN_BATCH, self->in_batch) < 0 ||
        find_offsets(given[MESSAGE_TYPE], message_fields, IN_MESSAGE, self->in_message) < 0 ||
        find_offsets(given[COLUMNS_TYPE], columns_fields, IN_COLUMNS, self->in_columns) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void dealloc_getter(PyObject *object)
{
    ColumnGetter *self = (ColumnGetter *)object;
    for (int at = 0; at < NUM_TYPES; at++)
        Py_XDECREF(self->types[at]);
    Py_XDECREF(self->doc);
    Py_XDECREF(self->logprob);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* The entry of a message without log-probabilities and with one token for each entry, without
 * EntryObjects: most are such. NULL, perhaps without an exception, for another message. */
static PyObject *get_plain(const ColumnGetter *self, PyObject *message, Py_ssize_t entry)
{
    if (message == NULL || Py_TYPE(message) != self->types[MESSAGE_TYPE])
        return NULL;
    PyObject *counts = *slot_of(message, self->in_message[TOKEN_COUNTS]);
    PyObject *ids = *slot_of(message, self->in_message[TOKEN_IDS]);
    if (*slot_of(message, self->in_message[LOGPROBS]) != Py_None || counts == NULL ||
        !PyBytes_CheckExact(counts) || PyBytes_GET_SIZE(counts) != 0 || ids == NULL ||
        !PyBytes_CheckExact(ids) || entry < 0 || entry >= PyBytes_GET_SIZE(ids) / 4)
        return NULL;
    if (self->make == logprobs_of)
        return Py_NewRef(Py_None);
    uint32_t id;
    memcpy(&id, PyBytes_AS_STRING(ids) + 4 * entry, 4);
    PyObject *number = PyLong_FromUnsignedLong(id), *found = number == NULL ? NULL : PyList_New(1);
    if (found == NULL)
        Py_XDECREF(number);
    else
        PyList_SET_ITEM(found, 0, number);
    return found;
}

/* The EntryObjects of a batch, made if it has none yet; NULL, perhaps without an exception, where
 * the batch has to be asked for them. */
static PyObject *objects_in(const ColumnGetter *self, PyObject *batch)
{
    PyObject **objects = slot_of(batch, self->in_batch[OBJECTS]);
    PyObject *message = *slot_of(batch, self->in_batch[MESSAGE]);
    if (*objects != NULL && *objects != Py_None)
        return Py_NewRef(*objects);
    if (message == NULL || Py_TYPE(message) != self->types[MESSAGE_TYPE])
        return NULL;
    PyObject *texts = *slot_of(message, self->in_message[TEXTS]);
    PyObject *columns = *slot_of(message, self->in_message[LOGPROBS]);
    PyObject *given[NUM_COLUMNS] = {*slot_of(message, self->in_message[TOKEN_IDS]),
                                    *slot_of(message, self->in_message[TOKEN_COUNTS]),
                                    no_bytes, no_bytes, no_bytes, no_bytes};
    Py_ssize_t width = 0;
    if (texts == NULL || !PyList_Check(texts) || columns == NULL)
        return NULL;
    if (columns != Py_None) {
        if (Py_TYPE(columns) != self->types[COLUMNS_TYPE])
            return NULL;
        width = PyLong_AsSsize_t(*slot_of(columns, self->in_columns[WIDTH]));
        if (width == -1 && PyErr_Occurred())
            return NULL;
        for (int at = 0; at < NUM_COLUMNS - VALUES; at++)
            given[VALUES + at] = *slot_of(columns, self->in_columns[WIDTH + 1 + at]);
    }
    PyObject *found = objects_of(PyList_GET_SIZE(texts), width, given, self->logprob);
    if (found != NULL)
        set_slot(batch, self->in_batch[OBJECTS], Py_NewRef(found));
    return found;
}

static PyObject *get(PyObject *object, PyObject *delta, PyObject *owner)
{
    (void)owner;
    ColumnGetter *self = (ColumnGetter *)object;
    if (delta == NULL || delta == Py_None)
        return Py_NewRef(object);
    if (!PyObject_TypeCheck(delta, self->types[OWNER])) {
        PyErr_SetString(PyExc_TypeError, "not a Delta");
        return NULL;
    }
    PyObject *batch = *slot_of(delta, self->in_delta[BATCH]), *objects = NULL, *made = NULL;
    PyObject *entry = *slot_of(delta, self->in_delta[ENTRY]);
    PyObject *skip = *slot_of(delta, self->in_delta[SKIP]);
    if (batch == NULL || entry == NULL || skip == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a Delta without its fields");
        return NULL;
    }
    if (Py_TYPE(batch) == self->types[BATCH_TYPE]) {
        if (PyLong_CheckExact(entry) && PyLong_CheckExact(skip) && PyObject_Not(skip) == 1) {
            const Py_ssize_t at = PyLong_AsSsize_t(entry);
            if (at == -1 && PyErr_Occurred())
                return NULL;
            made = get_plain(self, *slot_of(batch, self->in_batch[MESSAGE]), at);
            if (made != NULL || PyErr_Occurred())
                return made;
        }
        objects = objects_in(self, batch);
        if (objects == NULL && PyErr_Occurred())
            return NULL;
    }
    if (objects == NULL && (objects = PyObject_GetAttr(batch, objects_name)) == NULL)
        return NULL;
    if (Py_TYPE(objects) == objects_type)
        made = make_checked((EntryObjects *)objects, self->make, entry, skip);
    else
        PyErr_SetString(PyExc_TypeError, "objects: expected EntryObjects");
    Py_DECREF(objects);
    return made;
}

static PyMemberDef getter_members[] = {
    {"__doc__", T_OBJECT, offsetof(ColumnGetter, doc), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot getter_slots[] = {{Py_tp_new, new_getter},
                                     {Py_tp_dealloc, dealloc_getter},
                                     {Py_tp_descr_get, get},
                                     {Py_tp_members, getter_members},
                                     {0, NULL}};
static PyType_Spec getter_spec = {
    .name = "slipstream._native.ColumnGetter",
    .basicsize = sizeof(ColumnGetter),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = getter_slots,
};

/* ---- DeltaMaker ------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyTypeObject *made; /* Delta */
    Py_ssize_t in_delta[IN_DELTA];
    PyObject *zero;
} DeltaMaker;

/* An iterator over (index, Delta), made one by one. */
typedef struct {
    PyObject_HEAD
    DeltaMaker *maker;
    PyObject *indices, *texts, *batch;
    PyObject *pair; /* the last one, used again where nothing else refers to it */
    Py_ssize_t at;
} DeltaItems;

static PyTypeObject *items_type;

/* DeltaMaker(Delta). Raises TypeError for a class whose instances are laid out otherwise. */
static PyObject *new_maker(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    PyTypeObject *made;
    Py_ssize_t offsets[IN_DELTA];
    if (!PyArg_ParseTuple(args, "O!", &PyType_Type, &made) ||
        find_offsets(made, delta_fields, IN_DELTA, offsets) < 0)
        return NULL;
    if (!consists_of(made, IN_DELTA)) {
        PyErr_SetString(PyExc_TypeError, "instances have more than their four fields");
        return NULL;
    }
    DeltaMaker *self = (DeltaMaker *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->made = (PyTypeObject *)Py_NewRef(made);
    memcpy(self->in_delta, offsets, sizeof offsets);
    self->zero = PyLong_FromLong(0);
    return (PyObject *)self;
}

static void dealloc_maker(PyObject *object)
{
    DeltaMaker *self = (DeltaMaker *)object;
    Py_XDECREF(self->made);
    Py_XDECREF(self->zero);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* items(indices, texts, batch) -> iterator over (indices[i], Delta(texts[i], batch, i)) */
static PyObject *items(PyObject *maker, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 3 || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists and a batch");
        return NULL;
    }
    if (PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
        PyErr_Format(PyExc_ValueError, "%zd indices of %zd texts", PyList_GET_SIZE(args[0]),
                     PyList_GET_SIZE(args[1]));
        return NULL;
    }
    DeltaItems *self = (DeltaItems *)items_type->tp_alloc(items_type, 0);
    if (self == NULL)
        return NULL;
    self->maker = (DeltaMaker *)Py_NewRef(maker);
    self->indices = Py_NewRef(args[0]);
    self->texts = Py_NewRef(args[1]);
    self->batch = Py_NewRef(args[2]);
    return (PyObject *)self;
}

static PyObject *new_delta(const DeltaItems *self, PyObject *text)
{
    const DeltaMaker *maker = self->maker;
    PyObject *entry = PyLong_FromSsize_t(self->at);
    PyObject *const values[] = {text, self->batch, entry, maker->zero};
    PyObject *delta =
        entry == NULL ? NULL : new_instance(maker->made, maker->in_delta, values, IN_DELTA);
    Py_XDECREF(entry);
    return delta;
}

static PyObject *next_item(PyObject *object)
{
    DeltaItems *self = (DeltaItems *)object;
    if (self->at >= PyList_GET_SIZE(self->indices) || self->at >= PyList_GET_SIZE(self->texts))
        return NULL;
    PyObject *index = PyList_GET_ITEM(self->indices, self->at);
    PyObject *delta = new_delta(self, PyList_GET_ITEM(self->texts, self->at));
    if (delta == NULL)
        return NULL;
    self->at++;
    if (self->pair != NULL && Py_REFCNT(self->pair) == 1) {
        PyObject *old_index = PyTuple_GET_ITEM(self->pair, 0);
        PyObject *old_delta = PyTuple_GET_ITEM(self->pair, 1);
        PyObject *pair = Py_NewRef(self->pair);
        PyTuple_SET_ITEM(pair, 0, Py_NewRef(index));
        PyTuple_SET_ITEM(pair, 1, delta);
        Py_DECREF(old_index);
        Py_DECREF(old_delta);
        return pair;
    }
    PyObject *pair = PyTuple_Pack(2, index, delta);
    Py_DECREF(delta);
    if (pair != NULL)
        Py_XSETREF(self->pair, Py_NewRef(pair));
    return pair;
}

static void dealloc_items(PyObject *object)
{
    DeltaItems *self = (DeltaItems *)object;
    Py_XDECREF(self->maker);
    Py_XDECREF(self->indices);
    Py_XDECREF(self->texts);
    Py_XDECREF(self->batch);
    Py_XDECREF(self->pair);
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef maker_methods[] = {METHOD(items), {NULL, NULL, 0, NULL}};
static PyType_Slot maker_slots[] = {{Py_tp_new, new_maker},
                                    {Py_tp_dealloc, dealloc_maker},
                                    {Py_tp_methods, maker_methods},
                                    {0, NULL}};
static PyType_Spec maker_spec = {
    .name = "slipstream._native.DeltaMaker",
    .basicsize = sizeof(DeltaMaker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = maker_slots,
};
static PyType_Slot items_slots[] = {{Py_tp_dealloc, dealloc_items},
                                    {Py_tp_iter, PyObject_SelfIter},
                                    {Py_tp_iternext, next_item},
                                    {0, NULL}};
static PyType_Spec items_spec = {
    .name = "slipstream._native.DeltaItems",
    .basicsize = sizeof(DeltaItems),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = items_slots,
};

/* ---- the module ------------------------------------------------------------------------- */

int add_delta_objects(PyObject *module)
{
    objects_name = PyUnicode_InternFromString("objects");
    no_bytes = PyBytes_FromStringAndSize(NULL, 0);
    items_type = (PyTypeObject *)PyType_FromSpec(&items_spec);
    if (objects_name == NULL || no_bytes == NULL || items_type == NULL)
        return -1;
    objects_type = add_type(module, &object_spec);
    if (objects_type == NULL || add_type(module, &getter_spec) == NULL)
        return -1;
    return add_type(module, &maker_spec) == NULL ? -1 : 0;
}
