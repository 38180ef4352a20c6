//! Which inputs of a graph choose rows of constant tables, as tokens do of an embedding.

use super::{Field, LONGEST, Message, Payload, malformed};
use std::collections::BTreeMap;
use std::io::{self, Cursor, Read, Seek};

/// GraphProto's fields (onnx.proto3).
const NODE: u64 = 1;
const INITIALIZER: u64 = 5;
/// TensorProto's fields.
const DIMS: u64 = 1;
const NAME: u64 = 8;
/// NodeProto's fields.
const INPUT: u64 = 1;
const OP_TYPE: u64 = 4;
const ATTRIBUTE: u64 = 5;
const DOMAIN: u64 = 7;
/// AttributeProto's fields.
const INT: u64 = 3;

/// The rows of the tables of a graph, by the names of the values that choose among them; the fewest, where one chooses from several.
pub(super) fn rows<R: Read + Seek>(graph: &mut Message<R>) -> io::Result<BTreeMap<String, u64>> {
    let (mut lookups, mut sizes) = (Vec::new(), BTreeMap::new());
    while let Some(field) = graph.next()? {
        match field {
            // A longer one has a constant among its attributes, and is none that is looked for.
            Field { number: NODE, value: Payload::Bytes(len) } if len <= LONGEST => {
                // What is no node is the runtime's to refuse.
                lookups.extend(lookup(&graph.bytes(len)?).ok().flatten());
            }
            Field { number: INITIALIZER, value: Payload::Bytes(len) } => {
                let (name, first) = graph.within(len, table)?;
                sizes.extend(first.map(|first| (name, first)));
            }
            Field { value: Payload::Bytes(len), .. } => graph.skip(len)?,
            Field { .. } => {}
        }
    }
    let mut rows = BTreeMap::new();
    for (table, chooser) in lookups {
        if let Some(&size) = sizes.get(&table) {
            let fewest = rows.entry(chooser).or_insert(size);
            *fewest = size.min(*fewest);
        }
    }
    Ok(rows)
}

/// The name and the first dimension of a constant.
fn table<R: Read + Seek>(tensor: &mut Message<R>) -> io::Result<(String, Option<u64>)> {
    let (mut name, mut first) = (String::new(), None);
    while let Some(field) = tensor.next()? {
        match field {
            Field { number: DIMS, value: Payload::Number(size) } => first = first.or(Some(size)),
            // All of them, packed.
            Field { number: DIMS, value: Payload::Bytes(len) } => {
                let size =
                    tensor.within(len, |dims| if dims.left == 0 { Ok(None) } else { dims.varint().map(Some) })?;
                first = first.or(size);
            }
            Field { number: NAME, value: Payload::Bytes(len) } => name = text(tensor.bytes(len)?)?,
            Field { value: Payload::Bytes(len), .. } => tensor.skip(len)?,
            Field { .. } => {}
        }
    }
    Ok((name, first))
}

/// The table and what chooses from it, of a node that gathers along the first dimension.
fn lookup(node: &[u8]) -> io::Result<Option<(String, String)>> {
    let mut message = Message::new(Cursor::new(node), node.len() as u64);
    let (mut inputs, mut is_gather, mut is_standard, mut along_first) = (Vec::new(), false, true, true);
    while let Some(field) = message.next()? {
        let Field { number, value: Payload::Bytes(len) } = field else { continue };
        match number {
            INPUT => inputs.push(text(message.bytes(len)?)?),
            OP_TYPE => is_gather = message.bytes(len)? == b"Gather",
            DOMAIN => is_standard = matches!(message.bytes(len)?.as_slice(), b"" | b"ai.onnx"),
            // Gather has one attribute: the axis.
            ATTRIBUTE => along_first &= message.within(len, integer)? == 0,
            _ => message.skip(len)?,
        }
    }
    match <[String; 2]>::try_from(inputs) {
        Ok([table, chooser]) if is_gather && is_standard && along_first => Ok(Some((table, chooser))),
        _ => Ok(None),
    }
}

/// An attribute's integer; 0 where it has none.
fn integer<R: Read + Seek>(attribute: &mut Message<R>) -> io::Result<u64> {
    let mut found = 0;
    while let Some(field) = attribute.next()? {
        match field {
            Field { number: INT, value: Payload::Number(number) } => found = number,
            Field { value: Payload::Bytes(len), .. } => attribute.skip(len)?,
            Field { .. } => {}
        }
    }
    Ok(found)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| malformed("a name is not UTF-8"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    fn gather(table: &str, chooser: &str, rest: &[u8]) -> Vec<u8> {
        let node = [field(1, table.as_bytes()), field(1, chooser.as_bytes()), field(4, b"Gather"), rest.to_vec()];
        field(1, &node.concat())
    }

    fn found(graph: &[Vec<u8>]) -> io::Result<BTreeMap<String, u64>> {
        let bytes = graph.concat();
        rows(&mut Message::new(Cursor::new(bytes.as_slice()), bytes.len() as u64))
    }

    #[test]
    fn tables_are_found() {
        let packed = field(5, &[field(1, b"\x05\x02"), field(8, b"w"), field(9, &[0; 100])].concat());
        let apart = field(5, &[b"\x08\x03\x08\x02".to_vec(), field(8, b"v")].concat());
        let axis = |number: u8| field(5, &[field(1, b"axis"), vec![3 << 3, number]].concat());
        let graph = [
            gather("w", "ids", &axis(0)),
            gather("v", "types", b""),
            gather("v", "ids", b""),
            gather("w", "columns", &axis(1)),
            gather("computed", "others", b""),
            gather("w", "of_another", &field(7, b"com.example")),
            field(1, &[field(1, b"w"), field(1, b"x"), field(4, b"MatMul")].concat()),
            packed,
            apart,
        ];
        let expected = [("ids", 3), ("types", 3)].map(|(name, rows)| (name.to_owned(), rows));
        assert_eq!(found(&graph).unwrap(), BTreeMap::from(expected));
        let bytes = graph.concat();
        for len in 0..bytes.len() {
            let _ = found(&[bytes[..len].to_vec()]);
        }
    }
}
