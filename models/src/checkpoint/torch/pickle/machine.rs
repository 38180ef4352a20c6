//! The stack machine that a pickle is a program for.

use std::collections::HashMap;

use super::{Array, ElementType, Global, Node, Pickle, PickleFault, Storage, Tensor, Value};

/// Instructions of a pickle: enough for a hundred thousand tensors, and a bound on memory.
const INSTRUCTIONS: usize = 1 << 22;

/// Runs a pickle.
pub(in crate::checkpoint::torch) fn parse(bytes: &[u8]) -> Result<Pickle<'_>, PickleFault> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode: 0,
        start: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        nodes: Vec::new(),
    };
    for _ in 0..INSTRUCTIONS {
        if let Some(root) = machine.step()? {
            return Ok(Pickle { nodes: machine.nodes, root });
        }
    }
    Err(PickleFault::Limit { what: "instructions:", found: INSTRUCTIONS + 1, limit: INSTRUCTIONS })
}

struct Machine<'a> {
    bytes: &'a [u8],
    /// The next byte.
    at: usize,
    /// The instruction being run, and where it is.
    opcode: u8,
    start: usize,
    stack: Vec<Value<'a>>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<usize, Value<'a>>,
    nodes: Vec<Node<'a>>,
}

type Outcome<T> = Result<T, PickleFault>;

impl<'a> Machine<'a> {
    /// Runs an instruction. The last one gives the result.
    fn step(&mut self) -> Outcome<Option<Value<'a>>> {
        self.start = self.at;
        let [opcode] = self.take_array()?;
        self.opcode = opcode;
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => self.protocol()?,
            // A frame is a hint for readers of streams.
            0x95 => drop(self.take_array::<8>()?),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => self.pop_or_unmark()?,
            b'1' => drop(self.pop_marked()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }

            b'N' => self.stack.push(Value::Other),
            0x88 | 0x89 => self.stack.push(Value::Bool(opcode == 0x88)),
            b'K' | b'M' | b'J' | 0x8a | 0x8b => self.integer()?,
            b'G' => self.other::<8>()?,
            b'X' | 0x8c | 0x8d => {
                // Python writes unpaired surrogates too, which no tensor's name has.
                let text = std::str::from_utf8(self.take_counted()?);
                self.stack.push(text.map_or(Value::Other, Value::Text));
            }
            b'B' | b'C' | b'T' | b'U' | 0x8e | 0x96 => {
                let bytes = self.take_counted()?;
                self.stack.push(Value::Bytes(bytes));
            }

            b')' => self.push(Node::Tuple(Vec::new())),
            b't' => {
                let items = self.pop_marked()?;
                self.push(Node::Tuple(items));
            }
            0x85..=0x87 => self.short_tuple(usize::from(opcode - 0x84))?,
            b'}' => self.push(Node::Dict(Vec::new())),
            b's' => {
                let pair = self.pop_two()?;
                self.set_items(vec![pair.0, pair.1])?;
            }
            b'u' => {
                let items = self.pop_marked()?;
                self.set_items(items)?;
            }
            b'd' => {
                let items = self.pop_marked()?;
                self.push(Node::Dict(Vec::new()));
                self.set_items(items)?;
            }
            // Nothing that a tensor needs is in a list or set.
            b']' => self.push(builtin("list")),
            0x8f => self.push(builtin("set")),
            b'l' | 0x91 => {
                self.pop_marked()?;
                self.push(builtin(if opcode == b'l' { "list" } else { "frozenset" }));
            }
            b'a' => self.ignore_top()?,
            b'e' | 0x90 => {
                self.pop_marked()?;
                self.top()?;
            }

            b'q' | b'r' | 0x94 => self.store()?,
            b'h' | b'j' => self.fetch()?,

            b'c' => {
                let global = Global { module: self.line()?, name: self.line()? };
                self.push(Node::Global(global));
            }
            0x93 => self.stack_global()?,
            b'R' | 0x81 => {
                let (callable, arguments) = self.pop_two()?;
                self.call(callable, arguments);
            }
            0x92 => {
                self.pop()?;
                let (callable, _) = self.pop_two()?;
                let opaque = Node::Opaque(self.global(callable));
                self.push(opaque);
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                self.build(object, state);
            }
            b'Q' => self.persistent()?,
            _ => return Err(PickleFault::Opcode { at: self.start, opcode }),
        }
        Ok(None)
    }

    fn protocol(&mut self) -> Outcome<()> {
        match self.take_array()? {
            [0..=5] => Ok(()),
            [found] => Err(PickleFault::Protocol { found }),
        }
    }

    fn take(&mut self, count: usize) -> Outcome<&'a [u8]> {
        let end = self.at.checked_add(count).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or(PickleFault::Truncated { at: self.bytes.len() })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// A little-endian number of up to 8 bytes.
    fn take_number(&mut self, count: usize) -> Outcome<usize> {
        let number = self.take(count)?.iter().rev().fold(0u64, |n, &byte| n << 8 | u64::from(byte));
        // What does not fit into memory does not fit into the file either.
        usize::try_from(number).map_err(|_| PickleFault::Truncated { at: self.bytes.len() })
    }

    /// Bytes after their number, in as many bytes as the instruction says.
    fn take_counted(&mut self) -> Outcome<&'a [u8]> {
        let width = match self.opcode {
            b'C' | b'U' | 0x8c => 1,
            b'B' | b'T' | b'X' => 4,
            _ => 8,
        };
        let count = self.take_number(width)?;
        self.take(count)
    }

    fn line(&mut self) -> Outcome<&'a str> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|&byte| byte == b'\n');
        let end = end.ok_or(PickleFault::Truncated { at: self.bytes.len() })?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| PickleFault::Text { at: self.start })
    }

    fn other<const N: usize>(&mut self) -> Outcome<()> {
        self.take_array::<N>()?;
        self.stack.push(Value::Other);
        Ok(())
    }

    fn integer(&mut self) -> Outcome<()> {
        let value = match self.opcode {
            b'K' => Value::Int(i64::from(self.take_array::<1>()?[0])),
            b'M' => Value::Int(i64::from(u16::from_le_bytes(self.take_array()?))),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(self.take_array()?))),
            opcode => {
                let count = self.take_number(if opcode == 0x8a { 1 } else { 4 })?;
                signed(self.take(count)?).map_or(Value::Other, Value::Int)
            }
        };
        self.stack.push(value);
        Ok(())
    }

    fn operand(&self, expected: &'static str) -> PickleFault {
        PickleFault::Operand { at: self.start, opcode: self.opcode, expected }
    }

    /// Height below which an instruction may not take.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Outcome<Value<'a>> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn top(&self) -> Outcome<Value<'a>> {
        let above = &self.stack[self.floor()..];
        above.last().copied().ok_or_else(|| self.operand("value on the stack"))
    }

    fn pop_two(&mut self) -> Outcome<(Value<'a>, Value<'a>)> {
        let second = self.pop()?;
        Ok((self.pop()?, second))
    }

    fn pop_marked(&mut self) -> Outcome<Vec<Value<'a>>> {
        let mark = self.marks.pop().ok_or_else(|| self.operand("mark on the stack"))?;
        Ok(self.stack.split_off(mark))
    }

    fn pop_or_unmark(&mut self) -> Outcome<()> {
        match self.marks.last() {
            Some(&mark) if mark == self.stack.len() => self.marks.truncate(self.marks.len() - 1),
            _ => drop(self.pop()?),
        }
        Ok(())
    }

    /// Drops what would be put into the value below it.
    fn ignore_top(&mut self) -> Outcome<()> {
        self.pop()?;
        self.top().map(drop)
    }

    fn push(&mut self, node: Node<'a>) {
        self.stack.push(Value::Node(self.nodes.len()));
        self.nodes.push(node);
    }

    fn short_tuple(&mut self, count: usize) -> Outcome<()> {
        let height = self.stack.len().checked_sub(count).filter(|&height| height >= self.floor());
        let height = height.ok_or_else(|| self.operand("values on the stack"))?;
        let items = self.stack.split_off(height);
        self.push(Node::Tuple(items));
        Ok(())
    }

    /// Puts keys and values, alternating, into the dictionary on top.
    fn set_items(&mut self, items: Vec<Value<'a>>) -> Outcome<()> {
        let fault = self.operand("dictionary and pairs for it");
        let Value::Node(index) = self.top()? else { return Err(fault) };
        let (pairs, []) = items.as_chunks::<2>() else { return Err(fault) };
        match self.nodes.get_mut(index) {
            Some(Node::Dict(entries)) => entries.extend(pairs.iter().map(|&[key, value]| (key, value))),
            Some(Node::Opaque(_)) => {}
            _ => return Err(fault),
        }
        Ok(())
    }

    fn store(&mut self) -> Outcome<()> {
        let index = match self.opcode {
            b'q' => self.take_number(1)?,
            b'r' => self.take_number(4)?,
            _ => self.memo.len(),
        };
        let top = self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    fn fetch(&mut self) -> Outcome<()> {
        let index = self.take_number(if self.opcode == b'h' { 1 } else { 4 })?;
        let value = self.memo.get(&index).copied().ok_or(PickleFault::Memo { at: self.start, index })?;
        self.stack.push(value);
        Ok(())
    }

    fn stack_global(&mut self) -> Outcome<()> {
        let (Value::Text(module), Value::Text(name)) = self.pop_two()? else { return Err(self.operand("names")) };
        self.push(Node::Global(Global { module, name }));
        Ok(())
    }

    fn node(&self, value: Value<'a>) -> Option<&Node<'a>> {
        match value {
            Value::Node(index) => self.nodes.get(index),
            _ => None,
        }
    }

    fn tuple(&self, value: Value<'a>) -> &[Value<'a>] {
        match self.node(value) {
            Some(Node::Tuple(items)) => items,
            _ => &[],
        }
    }

    /// What a value is or was made by, for people.
    fn global(&self, value: Value<'a>) -> Global<'a> {
        match self.node(value) {
            Some(Node::Global(global) | Node::Opaque(global)) => *global,
            _ => Global { module: "pickle", name: "object" },
        }
    }

    /// Puts on the stack what stands for the result of a call. None is made.
    fn call(&mut self, callable: Value<'a>, arguments: Value<'a>) {
        let (global, arguments) = (self.global(callable), self.tuple(arguments));
        let result = match (global.module, global.name) {
            ("collections", "OrderedDict") if arguments.is_empty() => Node::Dict(Vec::new()),
            ("torch._utils", "_rebuild_tensor_v2") => self.tensor(arguments).unwrap_or(Node::Opaque(global)),
            ("_codecs", "encode") => match *arguments {
                [Value::Text(text), Value::Text("latin1")] => Node::Latin1(text),
                _ => Node::Opaque(global),
            },
            ("__builtin__" | "builtins", "bytes") if arguments.is_empty() => Node::Latin1(""),
            ("numpy", "dtype") => match *arguments {
                [Value::Text(code), ..] => Node::ElementType(ElementType { code, big_endian: false }),
                _ => Node::Opaque(global),
            },
            ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer") => match *arguments {
                [data, element_type, shape, Value::Text(order)] => {
                    Node::Array(Array { shape, element_type, fortran: order == "F", data })
                }
                _ => Node::Opaque(global),
            },
            // A parameter is its tensor.
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") if !arguments.is_empty() => {
                let tensor = arguments[0];
                return self.stack.push(tensor);
            }
            _ => Node::Opaque(global),
        };
        self.push(result);
    }

    /// Gives an object its state. That of a dictionary is attributes, and that of most objects is for Python alone; numpy's arrays
    /// and element types are made empty and get their contents here.
    fn build(&mut self, object: Value<'a>, state: Value<'a>) {
        let built = match (self.node(object), self.tuple(state)) {
            (Some(Node::ElementType(element)), [_, Value::Text(order), ..]) => {
                Node::ElementType(ElementType { big_endian: *order == ">", ..*element })
            }
            (Some(Node::Opaque(global)), &[_, shape, element_type, Value::Bool(fortran), data])
                if matches!(global.module, "numpy.core.multiarray" | "numpy._core.multiarray")
                    && global.name == "_reconstruct" =>
            {
                Node::Array(Array { shape, element_type, fortran, data })
            }
            _ => return,
        };
        if let Value::Node(index) = object
            && let Some(node) = self.nodes.get_mut(index)
        {
            *node = built;
        }
    }

    fn tensor(&self, arguments: &[Value<'a>]) -> Option<Node<'a>> {
        let &[storage, Value::Int(offset), shape, strides, ref rest @ ..] = arguments else { return None };
        // After requires_grad and the hooks: that the tensor is the negative of what is stored, or its conjugate.
        let marks = rest.get(2).and_then(|&marks| self.node(marks));
        if matches!(marks, Some(Node::Dict(marks)) if !marks.is_empty()) {
            return None;
        }
        let Some(&Node::Storage(storage)) = self.node(storage) else { return None };
        Some(Node::Tensor(Tensor { storage, offset, shape, strides }))
    }

    /// A storage, which is named and lies elsewhere: ("storage", class, key, device, number of elements).
    fn persistent(&mut self) -> Outcome<()> {
        let id = self.pop()?;
        let storage = match *self.tuple(id) {
            [Value::Text("storage"), class, Value::Text(key), _, Value::Int(elements)] => {
                Node::Storage(Storage { class: self.global(class), key, elements })
            }
            _ => Node::Opaque(Global { module: "pickle", name: "persistent_id" }),
        };
        self.push(storage);
        Ok(())
    }
}

fn builtin(name: &'static str) -> Node<'static> {
    Node::Opaque(Global { module: "builtins", name })
}

/// A little-endian number in two's complement, if 64 bits hold it.
fn signed(bytes: &[u8]) -> Option<i64> {
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let fill = if negative { 0xff } else { 0 };
    let mut array = [fill; 8];
    array.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(array))
}
