//! Money, counted in whole units small enough for exact prices.

use std::fmt::{self, Display, Formatter};
use std::ops::Add;

use serde::de::{Expected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Billionths of a US dollar. The amount is displayed, written and read in dollars, without loss.
/// Sums saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanodollars(pub u64);

impl Nanodollars {
    pub const ZERO: Self = Self(0);

    const PER_DOLLAR: u64 = 1_000_000_000;

    /// Parses a decimal number of dollars, with an optional exponent. Rounds to the nearest
    /// billionth. No float is involved, so no other error is added.
    ///
    /// Returns `None` for a negative number, for a text that is no number, and for a number that is
    /// too large.
    ///
    /// ```
    /// use cogni_gateway::llm::budget::Nanodollars;
    ///
    /// assert_eq!(Nanodollars::parse("5.025e-05"), Some(Nanodollars(50_250)));
    /// assert_eq!(Nanodollars::parse("-1"), None);
    /// ```
    pub fn parse(dollars: &str) -> Option<Self> {
        let (mantissa, exponent) = dollars.split_once(['e', 'E']).unwrap_or((dollars, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if whole.is_empty() {
            return None;
        }
        let mut digits: u128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            let value = char::from(digit).to_digit(10)?;
            digits = digits.checked_mul(10)?.checked_add(value.into())?;
        }
        // The digits are an integer now. The power of ten to apply is the exponent, less the digits
        // after the point, plus nine for billionths.
        let point = i32::try_from(fraction.len()).ok()?;
        let scale = exponent.parse::<i32>().ok()?.checked_sub(point)?.checked_add(9)?;
        let power = 10_u128.checked_pow(scale.unsigned_abs());
        // Four cases: zero stays zero whatever its exponent; a positive scale multiplies; a
        // negative scale divides with rounding; a power too large for 128 bits is zero or an
        // overflow.
        let nanodollars = match power {
            _ if digits == 0 => 0,
            Some(power) if scale >= 0 => digits.checked_mul(power)?,
            Some(power) => digits.checked_add(power / 2)? / power,
            None if scale < 0 => 0,
            None => return None,
        };
        u64::try_from(nanodollars).ok().map(Self)
    }

    /// Appends the amount in its displayed form, without the overhead of `fmt`.
    pub fn append_to(self, text: &mut Vec<u8>) {
        text.extend_from_slice(itoa::Buffer::new().format(self.0 / Self::PER_DOLLAR).as_bytes());
        let (digits, length) = self.fraction_digits();
        text.extend_from_slice(&digits[..length]);
    }

    /// Returns the point and the digits after it, and the number of these bytes to display.
    fn fraction_digits(self) -> ([u8; 10], usize) {
        // One dollar more makes ten digits; the point takes the place of the first one.
        let mut number = itoa::Buffer::new();
        let text = number.format(Self::PER_DOLLAR + self.0 % Self::PER_DOLLAR);
        let mut digits = *text.as_bytes().first_chunk().expect("a dollar has ten digits");
        digits[0] = b'.';
        let last = digits.iter().rposition(|digit| !matches!(digit, b'0' | b'.'));
        (digits, last.map_or(0, |last| last + 1))
    }

    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }

    /// Returns the amount in dollars as a float, for metrics.
    #[expect(clippy::cast_precision_loss, reason = "a gauge is read by people")]
    pub fn to_dollars(self) -> f64 {
        self.0 as f64 / Self::PER_DOLLAR as f64
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for Nanodollars {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

/// Serializes as a string, because many readers take a JSON number for a float.
impl Serialize for Nanodollars {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Deserializes a string or a number. A float is read by the digits of its shortest form.
impl<'de> Deserialize<'de> for Nanodollars {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DollarsVisitor)
    }
}

/// A visitor that reads an amount in place, so that a value of another type costs no memory,
/// however large the value is.
struct DollarsVisitor;

impl Visitor<'_> for DollarsVisitor {
    type Value = Nanodollars;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("an amount of dollars, such as \"2.50\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Nanodollars, E> {
        Nanodollars::parse(text).ok_or_else(|| {
            let expected: &dyn Expected = &self;
            E::custom(format_args!("`{text}` is not {expected}"))
        })
    }

    fn visit_u64<E: de::Error>(self, dollars: u64) -> Result<Nanodollars, E> {
        self.visit_str(&dollars.to_string())
    }

    fn visit_i64<E: de::Error>(self, dollars: i64) -> Result<Nanodollars, E> {
        self.visit_str(&dollars.to_string())
    }

    fn visit_f64<E: de::Error>(self, dollars: f64) -> Result<Nanodollars, E> {
        self.visit_str(&dollars.to_string())
    }
}

impl Display for Nanodollars {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (digits, length) = self.fraction_digits();
        let fraction = str::from_utf8(&digits[..length]).expect("digits are ASCII");
        write!(f, "{}{fraction}", self.0 / Self::PER_DOLLAR)
    }
}

#[cfg(test)]
mod tests {
    use super::Nanodollars;

    #[test]
    fn dollars_are_read_to_the_nearest_billionth() {
        for (text, nanodollars) in [
            ("0", 0),
            ("0.0", 0),
            ("2", 2_000_000_000),
            ("0.00005025", 50_250),
            ("5.0249999999999996e-05", 50_250),
            ("5.0250000000000004E-5", 50_250),
            ("1e+1", 10_000_000_000),
            ("4e-10", 0),
            ("5e-10", 1),
            ("1e-400", 0),
            ("0e99999", 0),
            ("18446744073.709551615", u64::MAX),
        ] {
            assert_eq!(Nanodollars::parse(text), Some(Nanodollars(nanodollars)), "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_of_money_is_not_read_as_one() {
        for text in [
            "",
            "-1",
            "-0.0",
            ".5",
            "e5",
            "1e",
            "1e1e1",
            "NaN",
            "1_0",
            "1e400",
            "1e11",
            "\"1\"",
            "1e99999999999",
        ] {
            assert_eq!(Nanodollars::parse(text), None, "{text}");
        }
        assert_eq!(Nanodollars::parse(&"9".repeat(60)), None);
    }

    #[test]
    fn an_amount_is_shown_in_dollars() {
        for (nanodollars, text) in [
            (0, "0"),
            (1, "0.000000001"),
            (50_250, "0.00005025"),
            (2_000_000_000, "2"),
            (1_500_000_000, "1.5"),
            (u64::MAX, "18446744073.709551615"),
        ] {
            assert_eq!(Nanodollars(nanodollars).to_string(), text);
            let mut appended = vec![];
            Nanodollars(nanodollars).append_to(&mut appended);
            assert_eq!(appended, text.as_bytes());
        }
    }
}
