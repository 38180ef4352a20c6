//! Nodes of `ai.moh` operators as calls that the operator can be asked about.

use crate::graph::{Attribute, Dim, ElementType, Graph, Node};
use moh_operators::{Attributes, DOMAIN, DType, Error, Operator, Value, Variant, operator};

/// A node of an `ai.moh` operator: its attributes, and the shapes of its inputs as far as they are known.
#[derive(Debug)]
pub(crate) struct Call {
    attributes: Attributes,
    shapes: Vec<Option<Vec<Option<usize>>>>,
    /// What the operator's type parameter is.
    pub(crate) ty: ElementType,
}

impl Call {
    /// The call that `node` makes; `None` for a standard operator's.
    ///
    /// # Errors
    /// Attributes that the operator does not accept.
    pub(crate) fn of(graph: &Graph, node: &Node) -> Result<Option<Call>, Error> {
        let Some(operator) = operator(node.op_type).filter(|_| node.domain == DOMAIN) else { return Ok(None) };
        let attribute = |name: &str| node.attributes.iter().find(|(n, _)| *n == name).map(|(_, value)| value);
        let attributes = Attributes::read(operator, |def| match attribute(def.name)? {
            Attribute::Int(v) => Some(Value::Int(*v)),
            Attribute::Float(v) => Some(Value::Float(*v)),
            Attribute::Ints(v) => Some(Value::Ints(v.clone())),
            Attribute::String(_) | Attribute::Scalar(..) | Attribute::Constant(_) => None,
        })?;
        let values: Vec<_> = node.inputs.iter().map(|name| graph.value(name)).collect();
        let ty = values.first().and_then(Option::as_ref).map_or(ElementType::F32, |value| value.ty);
        // An input that nothing is known of is there all the same.
        let shapes = values.iter().map(|value| Some(value.as_ref().map_or(Vec::new(), |value| known(&value.dims))));
        Ok(Some(Call { attributes, shapes: shapes.collect(), ty }))
    }

    /// The operator.
    pub(crate) fn operator(&self) -> &'static Operator {
        self.attributes.operator()
    }

    fn shapes(&self) -> Vec<Option<&[Option<usize>]>> {
        self.shapes.iter().map(Option::as_deref).collect()
    }

    /// Which body the node needs.
    ///
    /// # Errors
    /// Never, because the attributes are the operator's own.
    pub(crate) fn variant(&self) -> Result<Variant, Error> {
        self.operator().variant(&self.attributes, &self.shapes())
    }

    /// The output's dimensions, as far as they follow from what is known.
    ///
    /// # Errors
    /// Inputs that the operator does not accept.
    #[cfg(test)]
    pub(crate) fn infer(&self) -> Result<Vec<moh_operators::shape::OutputDim>, Error> {
        self.operator().infer(&self.attributes, &self.shapes())
    }

    /// The shape of a constant that changes nothing in the place of optional input `input`, where it can be told.
    pub(crate) fn zeros(&self, input: usize) -> Option<Vec<usize>> {
        self.operator().zeros(&self.attributes, &self.shapes(), input)
    }

    /// The number that each element of that constant is.
    pub(crate) fn filler(&self, input: usize) -> u8 {
        self.operator().filler(&self.attributes, input)
    }
}

/// The dimensions that are numbers.
pub(crate) fn known(dims: &[Dim]) -> Vec<Option<usize>> {
    dims.iter().map(|dim| if let Dim::Fixed(n) = dim { Some(*n) } else { None }).collect()
}

/// The element type of an operand, where the operator's type parameter is `t`.
pub(crate) fn element_type(ty: moh_operators::ElementType, t: ElementType) -> ElementType {
    match ty.fixed() {
        None => t,
        Some(DType::F32) => ElementType::F32,
        Some(DType::F16) => ElementType::F16,
        Some(DType::BF16) => ElementType::BF16,
        Some(DType::U8) => ElementType::U8,
        Some(DType::I64) => ElementType::I64,
    }
}

/// Attributes as a node has them.
pub(crate) fn written(attributes: &Attributes) -> Vec<(&'static str, Attribute)> {
    let one = |value: &Value| match value {
        Value::Int(v) => Attribute::Int(*v),
        Value::Float(v) => Attribute::Float(*v),
        Value::Ints(v) => Attribute::Ints(v.clone()),
    };
    attributes.iter().map(|(def, value)| (def.name, one(value))).collect()
}
