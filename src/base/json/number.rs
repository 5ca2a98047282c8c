//! The syntax of a number, one byte at a time. The value is not computed.

/// The part of a number that was read last.
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

    /// The number with one more byte, or `None` where that byte cannot belong to it.
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
