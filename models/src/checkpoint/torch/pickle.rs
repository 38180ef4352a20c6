//! Python's pickle, as much of it as a state dict needs. Nothing is ever called: what the file would have Python build is kept
//! as a name, but for tensors and the dictionaries that hold them.
//!
//! Values refer to nodes by number, so that no depth of nesting, cycle or sharing costs more than the file's own bytes.
//! Source: the opcodes' descriptions in Python's `pickletools.py`, protocols 2 to 5.

mod machine;

use std::fmt;

use crate::error::PickleFault;

pub(super) use machine::parse;

/// The most dimensions that PyTorch's tensors have.
const RANK: usize = 64;

/// A value of a pickle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Int(i64),
    Bool(bool),
    Text(&'a str),
    Bytes(&'a [u8]),
    Node(usize),
    /// Anything that is not part of a tensor: None, floats.
    Other,
}

/// What values refer to.
#[derive(Debug)]
pub(super) enum Node<'a> {
    Tuple(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Global(Global<'a>),
    Storage(Storage<'a>),
    Tensor(Tensor<'a>),
    /// Bytes as text, which protocol 2 has no other way to store: each character is a byte.
    Latin1(&'a str),
    ElementType(ElementType<'a>),
    Array(Array<'a>),
    /// An object that only Python could build: what it would call.
    Opaque(Global<'a>),
}

/// The name of a class or function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Global<'a> {
    pub(super) module: &'a str,
    pub(super) name: &'a str,
}

impl fmt::Display for Global<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module.escape_debug(), self.name.escape_debug())
    }
}

/// Elements in a file of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Storage<'a> {
    /// `FloatStorage` and its like.
    pub(super) class: Global<'a>,
    /// Name of the file.
    pub(super) key: &'a str,
    /// Number of elements.
    pub(super) elements: i64,
}

/// A view of a storage, as the file says it, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tensor<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) offset: i64,
    /// Tuples, of which any number of tensors may share one.
    pub(super) shape: Value<'a>,
    pub(super) strides: Value<'a>,
}

/// numpy's element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ElementType<'a> {
    /// Kind and bytes: `f4`.
    pub(super) code: &'a str,
    pub(super) big_endian: bool,
}

/// A numpy array, as the file says it, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Array<'a> {
    pub(super) shape: Value<'a>,
    pub(super) element_type: Value<'a>,
    /// Whether the first index counts fastest.
    pub(super) fortran: bool,
    /// Bytes, or text that stands for them.
    pub(super) data: Value<'a>,
}

/// Everything that a pickle holds.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Value<'a>,
}

impl<'a> Pickle<'a> {
    /// The value that was pickled.
    pub(super) fn root(&self) -> Value<'a> {
        self.root
    }

    /// What a value refers to.
    pub(super) fn node(&self, value: Value<'a>) -> Option<&Node<'a>> {
        match value {
            Value::Node(index) => self.nodes.get(index),
            _ => None,
        }
    }

    /// A tuple of sizes: at most [`RANK`] integers that are not negative.
    pub(super) fn sizes(&self, value: Value<'a>) -> Option<Vec<usize>> {
        let Some(Node::Tuple(items)) = self.node(value) else { return None };
        let size = |item: &Value<'a>| if let Value::Int(n) = item { usize::try_from(*n).ok() } else { None };
        if items.len() <= RANK { items.iter().map(size).collect() } else { None }
    }

    /// A dictionary's values by their names, in the order of the file; keys that are no texts are left out.
    pub(super) fn named(&self, value: Value<'a>) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        let entries = match self.node(value) {
            Some(Node::Dict(entries)) => entries.as_slice(),
            _ => &[],
        };
        entries.iter().filter_map(|&(key, value)| match key {
            Value::Text(key) => Some((key, value)),
            _ => None,
        })
    }
}
