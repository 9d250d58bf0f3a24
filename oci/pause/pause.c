//go:build ignore

/*
 * pause holds a pod's namespaces open: it reaps orphans, and ends at SIGTERM or SIGINT. It has no libc and
 * blocks every signal: the kernel queues blocked signals for pid 1, but drops unhandled ones
 * (pid_namespaces(7)).
 */
#if defined(__x86_64__)
enum { WAIT4 = 61, RT_SIGPROCMASK = 14, RT_SIGTIMEDWAIT = 128, EXIT_GROUP = 231 };

static long call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall"
		: "=a"(result)
		: "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
		: "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
enum { WAIT4 = 260, RT_SIGPROCMASK = 135, RT_SIGTIMEDWAIT = 137, EXIT_GROUP = 94 };

static long call(long number, long a, long b, long c, long d)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc #0"
		: "+r"(x0)
		: "r"(x8), "r"(x1), "r"(x2), "r"(x3)
		: "memory");
	return x0;
}
#else
#error "pause knows the system calls of x86_64 and aarch64 only"
#endif

enum { SIG_BLOCK = 0, SIGINT = 2, SIGTERM = 15, SIGCHLD = 17, WNOHANG = 1 };

static void reap(void)
{
	while (call(WAIT4, -1, 0, WNOHANG, 0) > 0)
		;
}

void _start(void)
{
	unsigned long all = ~0UL;
	call(RT_SIGPROCMASK, SIG_BLOCK, (long)&all, 0, sizeof all);
	reap(); /* children whose SIGCHLD came before the mask was set */
	for (;;) {
		long sig = call(RT_SIGTIMEDWAIT, (long)&all, 0, 0, sizeof all);
		if (sig == SIGCHLD)
			reap();
		if (sig == SIGTERM || sig == SIGINT)
			call(EXIT_GROUP, 0, 0, 0, 0);
	}
}
