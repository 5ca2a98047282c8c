//! The syntax of a JSON number, read byte by byte. The value of the number is not computed.

/// The part of the number to which the last byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonNumberState {
    Minus,
    /// A leading zero: no digit may follow.
    Zero,
    Integer,
    Point,
    Fraction,
    /// `e` or `E`.
    Exponent,
    /// The exponent's sign.
    Sign,
    Power,
}

impl JsonNumberState {
    pub(super) fn start_number(byte: u8) -> Option<Self> {
        match byte {
            b'-' => Some(Self::Minus),
            b'0' => Some(Self::Zero),
            b'1'..=b'9' => Some(Self::Integer),
            _ => None,
        }
    }

    /// Returns the state after one more byte; `None` if that byte cannot belong to the number.
    pub(super) fn next_state(self, byte: u8) -> Option<Self> {
        match (self, byte) {
            (Self::Minus, b'0') => Some(Self::Zero),
            (Self::Minus | Self::Integer, b'0'..=b'9') => Some(Self::Integer),
            (Self::Zero | Self::Integer, b'.') => Some(Self::Point),
            (Self::Point | Self::Fraction, b'0'..=b'9') => Some(Self::Fraction),
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Some(Self::Exponent),
            (Self::Exponent, b'+' | b'-') => Some(Self::Sign),
            (Self::Exponent | Self::Sign | Self::Power, b'0'..=b'9') => Some(Self::Power),
            _ => None,
        }
    }

    /// Returns true if the number may end here.
    pub(super) fn is_complete(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Power)
    }
}
